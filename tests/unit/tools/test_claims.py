"""The page of the paper's claims: current, and its verdicts follow the figures of the results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import claims, figures
from tools.claims import BETTER, HOLDS, INCOMPARABLE, NOT, UNKNOWN
from tools.figures import Source


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the results, which may be changed."""
    folder = tmp_path / "results"
    shutil.copytree(figures.RESULTS, folder, ignore=shutil.ignore_patterns("*.json", "*.png"))
    monkeypatch.setattr(figures, "RESULTS", folder)
    return folder


def verdict(text: str) -> str:
    """The verdict on a claim of the page."""
    (row,) = [line for line in claims.page().splitlines() if line.startswith(f"| {text} |")]
    return row.split(" | ")[-1].rstrip(" |")


def test_the_page_is_current() -> None:
    assert claims.main(["--check"]) == 0, "run python -m tools.claims"


def test_every_claim_has_a_verdict_and_every_figure_its_command_and_machine() -> None:
    for claim in claims.CLAIMS:
        cells = claim.row().strip("| ").split(" | ")
        assert len(cells) == 7 and cells[-1] in {HOLDS, BETTER, NOT, INCOMPARABLE, UNKNOWN}, cells
        measured = claim.source is not None
        assert measured != (cells[-1] == UNKNOWN) and all(bool(cell.strip()) for cell in cells[4 : 5 + measured])


def replace_cells(page: str, heading: str, changed: dict[str, str]) -> str:
    """The page with other cells, by column, in the row of d128-n8192 below a heading."""
    before, found, below = page.partition(f"\n## {heading}\n")
    lines = below.splitlines(keepends=True)
    names = next(line for line in lines if line.startswith("| shape |")).split(" | ")
    place = next(i for i, line in enumerate(lines) if line.startswith("| d128-n8192 |"))
    cells = lines[place].split(" | ")
    for column, text in changed.items():
        cells[names.index(column)] = text
    lines[place] = " | ".join(cells)
    return before + found + "".join(lines)


@pytest.mark.parametrize(
    ("speed", "spread", "expected"),
    [("400", "1%", NOT), ("893", "1%", HOLDS), ("980", "1%", BETTER), ("980", "20%", HOLDS), ("2000", "20%", BETTER)],
)
def test_a_verdict_follows_its_figure(results: Path, speed: str, spread: str, expected: str) -> None:
    path = results / "attention-h200.md"
    page = replace_cells(path.read_text(encoding="utf-8"), "Speed", {"8b kernel": speed, "FA-2 kernel": "342"})
    page = replace_cells(page, "Spread", {"8b kernel": "1%", "FA-2 kernel": spread})
    path.write_text(page, encoding="utf-8")
    assert verdict("8b is faster than FlashAttention-2 on Hopper") == expected


def test_a_figure_that_is_gone_is_an_error(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "videos.md"
    path.write_text(path.read_text(encoding="utf-8").replace("SageAttn2-4b", "another"), encoding="utf-8")
    assert claims.main([]) == 1
    assert "videos.md" in capsys.readouterr().err


def test_parts_of_a_page_are_told_apart(results: Path) -> None:
    table = "### Table\n\n| a | b |\n| --- | --- |\n| **x** |"
    (results / "page.md").write_text(
        f"# Page\n\n- Machine: a toaster, warm.\n- Command: `toast`.\n\n## One\n\n{table} 1,000 |\n\n"
        f"## Two\n\n- Machine: an oven (hot).\n\n{table} 2.50 % |\n"
    )
    one, two = Source("page.md", "Table", "One"), Source("page.md", "Table", "Two")
    assert (one("x", "b"), two("x", "b"), f"{two('x', 'b')}") == (1000.0, 2.5, "2.50 %")
    assert (one.about("Machine"), two.about("Machine"), two.about("Command")) == ("a toaster", "an oven", "`toast`")
    with pytest.raises(ValueError, match="0 rows 'y'"):
        one("y", "b")
