"""The CPU time of a call: every entry reaches the kernels, without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
def test_every_entry_reaches_the_kernels() -> None:
    """In its own process, because a process keeps the driver that it has loaded."""
    command = [sys.executable, "-m", "lab.measurements.host_times", "--passes", "1", "--rounds", "2"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = re.findall(r"^\| (.+?) \| ([0-9.]+) \|", text, re.MULTILINE)
    assert [name for name, _ in rows] == [
        "`attention`, by a bare override",
        "the node, 8b always",
        "the node, 8b always, with a report",
    ]
    assert all(float(median) > 0.0 for _, median in rows)
