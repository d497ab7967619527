"""The log of what was tried on the kernels, and that the code cites lines that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile(r"\bE\d{3}\b")


def lines() -> list[list[str]]:
    """The cells of each experiment."""
    text = (ROOT / "csrc" / "EXPERIMENTS.md").read_text(encoding="utf-8")
    return [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| E")]


def test_each_has_a_number_of_its_own_and_the_newest_is_first() -> None:
    count = len(lines())
    assert count > 100
    assert [cells[0] for cells in lines()] == [f"E{number:03}" for number in range(count, 0, -1)]
    dates = [cells[1] for cells in lines()]
    assert dates == sorted(dates, reverse=True)
    assert all(len(cells) == 7 and all(cells) for cells in lines())


def test_what_the_code_cites_is_there() -> None:
    known = {cells[0] for cells in lines()}
    cited = {
        (found, path.name)
        for pattern in ("csrc/*.md", "csrc/**/*.h", "csrc/**/*.cuh", "csrc/**/*.cu", "csrc/**/*.cpp")
        for path in ROOT.glob(pattern)
        if path.name != "EXPERIMENTS.md"
        for found in ID.findall(path.read_text(encoding="utf-8"))
    }
    assert {"step_order.cuh", "DESIGN.md"} <= {name for _, name in cited}
    assert {found for found, _ in cited} <= known
