"""tools/count_issue_slots.py on listings written by hand."""

from __future__ import annotations

import pytest

from tools import count_issue_slots

# A loop of two products and two exponentials, with a cold path past the end that jumps back into it.
LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IMMA.16864.S4.S4 R8, R4.ROW, R2.COL, RZ ;
        /*0020*/                   MUFU.EX2 R8, R8 ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0040*/              @!PT LDS RZ, [RZ] ;
        /*0050*/                   LDS.128 R12, [R3] ;
        /*0060*/                   QMMA.16832.F32.E4M3.E4M3 R16, R8.ROW, R12.COL, RZ ;
        /*0068*/                   FMNMX R21, R20, R16, !PT ;
        /*0070*/                   FADD R20, R20, R16 ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   FMUL R20, R20, R9 ;
        /*00b0*/                   BRA `(.L_x_2) ;
"""


def test_steady_state_leaves_out_the_cold_path() -> None:
    code, labels = count_issue_slots.parse(LISTING)["kernel"]
    opcodes = [instruction.opcode for instruction in count_issue_slots.steady_state(code, labels)]
    kept = "IMMA.16864.S4.S4 MUFU.EX2 BRA LDS LDS.128 QMMA.16832.F32.E4M3.E4M3 FMNMX FADD BRA"
    assert opcodes == kept.split()


def test_report_counts_per_score_and_names_the_limits() -> None:
    code, labels = count_issue_slots.parse(LISTING)["kernel"]
    path = count_issue_slots.steady_state(code, labels)
    counts = count_issue_slots.report(path, head_dim=64, card=count_issue_slots.CARDS["RTX 4090"])
    # One product with 64 channels: 128 scores, 4 for each of the 32 lanes.
    assert (counts.instructions, counts.scores) == (9, 128)
    assert counts.per_score == {"tensor": 0.5, "MUFU": 0.25, "ALU": 0.25, "FMA": 0.25, "memory": 0.5, "other": 0.5}
    assert counts.ceilings["MUFU"] == pytest.approx(4 * 128 * 64 * 16 / 32 * 128 * 2.52e-3)
    # INT4 at 1321.2 TOPS and E4M3 with FP32 sums at 330.3, as the data sheet has them.
    seconds = 2 * 128 * (64 / 1321.2 + 32 / 330.3) * 1e-12
    assert counts.ceilings["tensor"] == pytest.approx(4 * 128 * 64 / seconds * 1e-12, rel=1e-3)
    # LDS.128 of 32 lanes takes four clocks of 128 bytes; the LDS is padding.
    assert counts.ceilings["shared memory"] == pytest.approx(4 * 128 * 64 / 4 * 128 * 2.52e-3)
