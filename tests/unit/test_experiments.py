"""The experiments that kernels cite are in csrc/EXPERIMENTS.md."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def test_what_the_code_cites_is_there() -> None:
    known = set(re.findall(r"^\| (E\d{3}) \|", (CSRC / "EXPERIMENTS.md").read_text(encoding="utf-8"), re.MULTILINE))
    sources = [file for file in CSRC.rglob("*") if file.suffix in {".h", ".cuh", ".cu", ".cpp", ".md"}]
    cited = {number for file in sources for number in re.findall(r"\bE\d{3}\b", file.read_text(encoding="utf-8"))}
    assert cited and cited <= known
