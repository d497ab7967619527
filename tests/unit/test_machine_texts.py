"""Facts about a machine whose tools say odd things."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from comfy_sage2.system import machine


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if sys.platform == "win32":
        pytest.skip("a shell script stands in for nvidia-smi")
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return program


def answer(program: Path, content: bytes, status: int = 0) -> None:
    (program.parent / "answer").write_bytes(content)
    program.write_text(f'#!/bin/sh\ncat "{program.parent}/answer"\nexit {status}\n')
    program.chmod(0o755)


def test_a_name_that_is_not_utf8_is_escaped(nvidia_smi: Path) -> None:
    answer(nvidia_smi, b"GPU \xe9\n\nGPU 2\n")
    assert machine.gpu_names() == [r"GPU \xe9", "GPU 2"]


def test_a_failing_program_gives_nothing(nvidia_smi: Path) -> None:
    answer(nvidia_smi, b"no devices were found\n", status=9)
    assert machine.gpu_names() == []


def test_windows_takes_the_driver_from_the_system_folder_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def library(name: str, winmode: int | None = None) -> None:
        asked.append((name, winmode))
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(sys, "platform", "win32")
    assert machine.loaded_driver() is None
    with pytest.raises(OSError, match=r"nvcuda\.dll"):
        machine.driver_cuda()
    search_system32 = 0x800
    assert asked == [("nvml.dll", search_system32), ("nvcuda.dll", search_system32)]
