"""The yardstick of the mma.sync kernels: its tables, its errors, and what it refuses."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from lab.bench.timing import Timed
from lab.measurements.mma_family import SHAPES, Build, Errors, shown, speed_table


def test_a_build_has_a_name_and_a_folder() -> None:
    assert Build.parse("after=build/a=b") == Build("after", Path("build/a=b"))


@pytest.mark.parametrize("text", ["", "after", "=folder", "after="])
def test_a_build_without_either_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=FOLDER"):
        Build.parse(text)


def test_the_page_does_not_say_where_a_build_lies() -> None:
    builds = [Build.parse("before=/home/someone/build"), Build.parse("before FP8=/home/someone/build")]
    assert shown(builds) == "--build before=FOLDER --build 'before FP8=FOLDER'"


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
