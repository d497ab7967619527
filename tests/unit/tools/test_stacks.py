"""The page of stacks, and the requirements of the packs in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import stacks
from tools.comfyui.environment import merged_requirements


def test_the_page_has_a_row_for_each_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stacks, "RECORDS", tmp_path / "records")
    with pytest.raises(SystemExit, match="there are no records"):
        stacks.page()
    stacks.record("KJNodes'", "ComfyUI 0.33.0", "bit-identical", ["16 of 16 calls", "a | b "])
    stacks.record("bleh", "ComfyUI 0.33.0", "close", [])
    stacks.record("bleh", "ComfyUI 0.33.0", "close", ["again"])
    rows = stacks.page().splitlines()[-2:]
    assert rows == [
        "| KJNodes' | ComfyUI 0.33.0 | bit-identical | 16 of 16 calls<br>a \\| b |",
        "| bleh | ComfyUI 0.33.0 | close | again |",
    ]


def test_requirements_of_packs_do_not_replace_comfyuis(tmp_path: Path) -> None:
    for folder, lines in {"ComfyUI": "numpy>=2\n", "packs/one": "numpy<2\ngguf>=0.13 # reads files\n"}.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "requirements.txt").write_text(lines, encoding="utf-8")
    (tmp_path / "packs" / "two").mkdir()
    (tmp_path / "ComfyUI" / "comfyui_version.py").write_text('__version__ = "0.33.0"\n', encoding="utf-8")
    found = merged_requirements([tmp_path / "ComfyUI"], tmp_path / "packs")
    assert "numpy>=2" in found and "numpy<2" not in found and "gguf>=0.13" in found
    assert not any(line.startswith("gguf") for line in merged_requirements([tmp_path / "ComfyUI"]))
