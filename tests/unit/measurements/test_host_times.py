"""The CPU time of a call: that every entry reaches the kernels without a GPU."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from lab.measurements import host_times


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
def test_every_entry_reaches_the_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    assert host_times.main(["--passes", "1", "--rounds", "2"]) == 0
    rows = re.findall(r"^\| (.+?) \| ([0-9.]+) \|", capfd.readouterr().out, re.MULTILINE)
    assert [name for name, _ in rows] == ["`attention`", "the node", "the node with a report"]
    assert all(float(median) > 0.0 for _, median in rows)
