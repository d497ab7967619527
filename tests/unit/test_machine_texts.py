"""Facts about a machine whose tools give odd answers."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from comfy_sage2.system import machine


def test_windows_takes_the_driver_from_the_system_folder_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def library(name: str, winmode: int | None = None) -> None:
        loaded.append((name, winmode))
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(sys, "platform", "win32")
    assert machine.loaded_driver() is None
    with pytest.raises(OSError, match=r"nvcuda\.dll"):
        machine.driver_cuda()
    search_system32 = 0x800
    assert loaded == [("nvml.dll", search_system32), ("nvcuda.dll", search_system32)]


@pytest.mark.parametrize(("code", "version"), [(0, "580.65.06"), (9, None)])
def test_the_management_library_is_closed_after_success_and_failure(
    code: int, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        open_users = 0

        def nvmlInitWithFlags(self, flags: int) -> int:
            self.open_users += 1
            return 0

        def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:
            text.value = b"580.65.06"
            return code

        def nvmlShutdown(self) -> int:
            self.open_users -= 1
            return 0

    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **options: library)
    assert machine.loaded_driver() == version
    assert library.open_users == 0
