"""The page of stacks, and the requirements of the packs in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import pages, reliability, stacks
from tools.comfyui.environment import merged_requirements


def test_the_page_has_a_row_for_each_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="there are no records"):
        stacks.PAGE.text()
    stacks.record("KJNodes'", "ComfyUI 0.33.0", "bit-identical", ["16 of 16 calls", "a | b "])
    stacks.record("bleh", "ComfyUI 0.33.0", "close", [])
    stacks.record("bleh", "ComfyUI 0.33.0", "close", ["again"])
    rows = stacks.PAGE.text().splitlines()[-2:]
    assert rows == [
        "| KJNodes' | ComfyUI 0.33.0 | bit-identical | 16 of 16 calls<br>a \\| b |",
        "| bleh | ComfyUI 0.33.0 | close | again |",
    ]


def test_the_command_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["reliability"])
    reliability.record("fuzz", "policies", 12345, 0)
    assert reliability.PAGE.command("what it does") == 0
    assert capsys.readouterr().out == f"written: {Path('docs', 'results', 'reliability.md')}\n"
    page = (tmp_path / "docs" / "results" / "reliability.md").read_text(encoding="utf-8")
    assert page.startswith("# What was tried to break the pack\n") and page.endswith(
        "| fuzz | policies | 12,345 | 0 |\n"
    )


def test_requirements_of_packs_do_not_replace_comfyuis(tmp_path: Path) -> None:
    for folder, lines in {"ComfyUI": "numpy>=2\n", "packs/one": "numpy<2\ngguf>=0.13 # reads files\n"}.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "requirements.txt").write_text(lines, encoding="utf-8")
    (tmp_path / "packs" / "two").mkdir()
    (tmp_path / "ComfyUI" / "comfyui_version.py").write_text('__version__ = "0.33.0"\n', encoding="utf-8")
    found = merged_requirements([tmp_path / "ComfyUI"], tmp_path / "packs")
    assert "numpy>=2" in found and "numpy<2" not in found and "gguf>=0.13" in found
    assert not any(line.startswith("gguf") for line in merged_requirements([tmp_path / "ComfyUI"]))
