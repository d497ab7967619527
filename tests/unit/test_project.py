"""Promises about the project's own files."""

from __future__ import annotations

import re
from pathlib import Path

import comfy_sage2

REPOSITORY = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_one_version() -> None:
    assert f'\nversion = "{comfy_sage2.__version__}"\n' in text("pyproject.toml")


def test_torch_is_never_required() -> None:
    required = re.search(r"^dependencies = \[(.*?)\]", text("pyproject.toml"), re.MULTILINE | re.DOTALL)
    assert required is not None
    names = {line.strip().lower() for line in text("requirements.txt").splitlines()}
    assert not any(name.startswith("torch") for name in names)
    assert '"torch' not in required[1]
    assert names == {name.strip(' "') for name in required[1].split(",")}
