"""The CPU time of a call: how it is timed, and that every entry reaches the kernels without a GPU."""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from lab.measurements import host_times


def test_every_call_has_its_turn_in_each_round() -> None:
    made = {"one": 0, "two": 0}

    def call(name: str) -> None:
        made[name] += 1

    found = host_times.time_rounds({name: partial(call, name) for name in made}, calls=3, rounds=4)
    assert {name: len(values) for name, values in found.items()} == {"one": 4, "two": 4}
    assert made == {"one": 3 + 3 * 4, "two": 3 + 3 * 4}  # the first ones warm up
    assert all(value >= 0.0 for values in found.values() for value in values)


def test_the_page_gives_median_and_spread() -> None:
    text = host_times.page("the command", {"an entry": [3.0, 1.0, 2.25]}, calls=7)
    assert "| an entry | 2.2 | 1.0 | 3.0 |" in text
    assert "medians of 3 rounds of 7 calls" in text and "`the command`" in text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
def test_every_entry_reaches_the_kernels(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pybind11")
    assert host_times.main(["--calls", "2", "--rounds", "1", "--results", str(tmp_path)]) == 0
    text = (tmp_path / "host-times.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| ([0-9.]+) \|", text, re.MULTILINE)
    assert [name for name, _ in rows] == [
        "ComfyUI's override, a new node",
        "ComfyUI's override, guard off",
        "`comfy_sage2.attention`",
        "diffusers' patch",
        "`sageattention.sageattn`",
        "torch's scaled_dot_product_attention",
    ]
    assert text in capfd.readouterr().out
