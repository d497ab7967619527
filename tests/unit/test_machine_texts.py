"""Facts about a machine whose tools say odd things."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comfy_sage2 import machine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for nvidia-smi")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return program


def answer(program: Path, content: bytes, status: int = 0) -> None:
    (program.parent / "answer").write_bytes(content)
    program.write_text(f'#!/bin/sh\ncat "{program.parent}/answer"\nexit {status}\n')
    program.chmod(0o755)


def test_text_that_is_not_utf8_is_escaped(nvidia_smi: Path) -> None:
    answer(nvidia_smi, b"580.1\xff, GPU \xe9\n")
    assert machine.nvidia_smi(["driver_version", "name"]) == [{"driver_version": r"580.1\xff", "name": r"GPU \xe9"}]
    assert machine.driver_version() == "version unknown (nvidia-smi does not run)"  # two fields are no version


def test_a_failing_program_gives_nothing(nvidia_smi: Path) -> None:
    answer(nvidia_smi, b"580.1\n", status=9)
    assert machine.nvidia_smi(["driver_version"]) == []


def test_lines_of_another_form_are_left_out(nvidia_smi: Path) -> None:
    answer(nvidia_smi, b"an unexpected, line\n\n580.1\n")
    assert machine.nvidia_smi(["driver_version"]) == [{"driver_version": "580.1"}]
    assert machine.driver_version() == "580.1"
