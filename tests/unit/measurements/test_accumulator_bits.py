"""The probe of the accumulator finds what an accumulator keeps, and sums over many keys show what two levels save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comfy_sage2.quantize.accumulators import ACCUMULATE_FP22, ACCUMULATE_FP32, Accumulator
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions
from lab.measurements import accumulators

CPU = torch.device("cpu")


def cut_to(bits: int) -> Accumulator:
    """An accumulator that truncates float32 to so many mantissa bits."""

    def narrow_(x: torch.Tensor) -> torch.Tensor:
        x.view(torch.int32).bitwise_and_(-(1 << (23 - bits)))
        return x

    return Accumulator(f"{bits} bits", 32, narrow_)


def attend_with(accumulator: Accumulator) -> accumulators.Attend:
    options = replace(ReferenceOptions(), accumulator=accumulator)
    return lambda q, k, v: reference_attention(q, k, v, options)[0]


@pytest.mark.parametrize("bits", [9, 10, 11, 12, 13, 14])
def test_the_bits_of_an_accumulator_are_found(bits: int) -> None:
    assert accumulators.mantissa_bits(attend_with(cut_to(bits)), CPU) == bits


def test_fp22_has_thirteen_bits_and_fp32_more_than_can_be_seen() -> None:
    assert accumulators.mantissa_bits(attend_with(ACCUMULATE_FP22), CPU) == 13
    assert accumulators.mantissa_bits(attend_with(ACCUMULATE_FP32), CPU) == accumulators.MOST_BITS


def test_two_levels_keep_the_error_of_long_sums_down() -> None:
    one, two = accumulators.emulated(False), accumulators.emulated(True)
    short, long = 512, 8192
    # The values are exact in E4M3: with an exact accumulator nothing is left but float32's rounding.
    assert accumulators.errors(attend_with(ACCUMULATE_FP32), long, CPU) < 1e-6
    # One truncating accumulator loses about as much at each of its steps, and so more the longer the sum is.
    assert accumulators.errors(one, long, CPU) > 8 * accumulators.errors(one, short, CPU)
    assert accumulators.errors(two, long, CPU) < 2 * accumulators.errors(two, short, CPU)
    assert accumulators.errors(two, long, CPU) < accumulators.errors(one, long, CPU) / 50


def test_the_page_names_machine_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulators, "LENGTHS", (256,))
    assert accumulators.main(["--device", "cpu", "--results", str(tmp_path)]) == 0
    written = (tmp_path / "accumulators.md").read_text(encoding="utf-8")
    assert written in capsys.readouterr().out
    assert "| emulated, two levels | 13 |" in written and "no kernel runs there" in written
    assert "- Command: `python -m lab accumulators --device cpu" in written
