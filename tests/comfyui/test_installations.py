"""Which ComfyUI the tests of this folder start."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import installations
from .installations import Installation


def comfyui(folder: Path, version: str, file: str = "comfyui_version.py") -> Path:
    folder.mkdir(parents=True)
    (folder / "main.py").touch()
    line = f'__version__ = "{version}"\n' if file.endswith(".py") else f'[project]\nversion = "{version}"\n'
    (folder / file).write_text(line)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a ComfyUI in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setenv("COMFY_SAGE2_HOST_PYTHON", str(comfyui(tmp_path / "ComfyUI", "0.33.0") / "main.py"))
    return tmp_path


def test_a_named_folder_wins_over_a_usual_one_of_its_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = comfyui(home / "elsewhere" / "ComfyUI", "0.34.1")
    monkeypatch.setenv("COMFYUI_PATH", str(named))
    first, second = installations.installations()[:2]
    assert (first.root, first.version, first.reason_missing) == (named, (0, 34, 1), None)
    assert (second.root, second.version) == (home / "ComfyUI", (0, 33, 0))
    assert first.name != second.name


def test_a_usual_folder_of_the_same_version_is_not_tested_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = comfyui(home / "elsewhere" / "MyFolder", "0.33.0")
    monkeypatch.setenv("COMFYUI_PATH", str(named))
    found = installations.installations()
    assert found[0].root == named and found[0].is_newest
    assert home / "ComfyUI" not in [entry.root for entry in found]


@pytest.mark.parametrize("file", ["comfyui_version.py", "pyproject.toml"])
def test_the_version_is_read_from_the_tree(tmp_path: Path, file: str) -> None:
    found = Installation(comfyui(tmp_path / "whatever", "0.8.0", file))
    assert found.version == (0, 8, 0) and found.name == "ComfyUI 0.8.0" and not found.is_newest


def test_a_named_folder_without_a_comfyui_is_kept_and_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(home / "nothing"))
    first = installations.installations()[0]
    assert first.named and "no ComfyUI at" in (first.reason_missing or "")
