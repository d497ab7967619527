"""The yardstick of the mma.sync kernels: its tables and its errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.bench.timing import Timed
from lab.measurements.mma_family import EMULATED, SHAPES, Errors, of_build, speed_table


@pytest.mark.parametrize(
    ("architecture", "formats", "accumulators", "found"),
    [
        ("sm90", ["fp8"], ["fp32"], {"8b fp32": "", "precise fp32": ""}),
        (
            "sm80", ["int8", "fp16"], ["fp32", "fp16"],
            {"8b fp32": "", "8b fp16": "", "8b int8": "", "precise fp32": "", "precise fp16": ""},
        ),
        ("sm89", ["fp8"], ["fp32"], {"8b fp32": EMULATED, "precise fp32": ""}),
    ],
)  # fmt: skip
def test_a_build_is_timed_with_what_it_has(
    architecture: str, formats: list[str], accumulators: list[str], found: dict[str, str]
) -> None:
    about = {"architecture": architecture, "version": "1.0.0", "target": "sm_90"}
    module: Any = SimpleNamespace(**about, pv_formats=formats, pv_accumulators=accumulators)
    candidates = of_build("new", module)
    assert {one.name.removeprefix("new: "): one.note for one in candidates} == found
    assert candidates[-1].kernel_name == ("precise_" if architecture == "sm90" else "attention_")


def test_errors_name_the_worst_row_and_channel() -> None:
    exact = torch.ones(1, 2, 4, 8, dtype=torch.float64)
    out = exact.clone()
    out[0, 1, 2, 3] = 2.0
    errors = Errors.of(out, exact)
    assert errors.all == pytest.approx(1 / 64)
    assert errors.row == pytest.approx(1 / 8)
    assert errors.channel == pytest.approx(1 / 4)


def test_speeds_are_of_medians_with_their_spread() -> None:
    shape = SHAPES["D128 N4096"]
    fast = Timed(0.0, calls=[2.0, 1.0, 1.1])
    table = list(speed_table("calls", {shape.name: {"ours": fast}}, ["ours", "theirs"]))
    assert table[2] == f"| ours | {shape.teraflops(1.1):.0f} (90.9%) |"
    assert table[3] == "| theirs | – |"
