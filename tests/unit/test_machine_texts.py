"""Facts about a machine whose tools say odd things."""

from __future__ import annotations

import ctypes
import sys

import pytest

from comfy_sage2.system import machine


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
