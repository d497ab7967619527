"""Which ComfyUIs the tests of this folder start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .installations import Installation, installations


def comfyui(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a ComfyUI in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    comfyui(tmp_path / "ComfyUI", "0.33.0")
    return tmp_path


def test_the_usual_folders_are_tested(home: Path) -> None:
    (installation,) = installations()
    assert installation.root == home / "ComfyUI" and installation.name == "ComfyUI 0.33.0" and installation.is_newest


def test_named_folders_are_tested_instead(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [comfyui(home / "elsewhere" / version, version) for version in ("0.34.1", "0.8.0")]
    monkeypatch.setenv("COMFYUI_PATH", os.pathsep.join(map(str, named)))
    assert [(installation.root, installation.is_newest) for installation in installations()] == [
        (named[0], True),
        (named[1], False),
    ]


def test_a_named_folder_without_a_comfyui_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(home / "nothing"))
    with pytest.raises(SystemExit, match=r"nothing, but there is no main\.py"):
        installations()


def test_without_a_python_they_say_what_to_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFY_SAGE2_HOST_PYTHON", str(home / "python"))
    assert "make host-environment" in (Installation(home / "ComfyUI").reason_missing or "")
