"""The page of what a user chooses from: current, and each figure says what measured it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import figures, modes
from tools.figures import Source
from tools.modes import COLUMNS, ROWS, TableCell


def test_the_page_is_current() -> None:
    assert modes.main(["--check"]) == 0, "run python -m tools.modes, then python -m tools.quotes"


def test_rows_have_a_cell_for_each_column() -> None:
    assert {len(cells) for cells in ROWS.values()} == {len(COLUMNS) - 1}


@pytest.mark.parametrize(
    ("machine", "row", "shown"),
    [("one NVIDIA H200, hot", "x", "1.5"), ("2 cores of a CPU", "x", "1.5†"), ("2 cores", "x, emulated", "3†‡")],
)
def test_a_figure_is_marked_by_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, row: str, shown: str
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    table = "| a | b |\n| --- | --- |\n| x | 1.5 (2.5) |\n| x, emulated | 3 |\n"
    (tmp_path / "page.md").write_text(f"# Page\n\n- Machine: {machine}.\n\n## Table\n\n{table}", encoding="utf-8")
    assert TableCell(Source("page.md", "Table"), row, "b").text() == shown


def test_a_figure_that_is_gone_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(figures.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.json", "*.png"))
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    path = tmp_path / "results" / "rotation.md"
    path.write_text(path.read_text(encoding="utf-8").replace("4b + rotation, sm90 kernel", "another"), encoding="utf-8")
    assert modes.main([]) == 1
    assert "rotation.md" in capsys.readouterr().err
