"""Facts about a machine whose tools say odd things."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from comfy_sage2.system import machine


class ManagementLibrary:
    """NVML with GPUs of these names; None is a GPU that does not answer."""

    def __init__(self, *names: bytes | None, status: int = 0) -> None:
        self.names, self.status = names, status

    def nvmlInit_v2(self) -> int:
        return self.status

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:
        name = self.names[handle.value - 1]
        text.value = name or b""
        return 15 if name is None else 0  # NVML_ERROR_GPU_IS_LOST


@pytest.mark.parametrize(
    ("library", "names"),
    [
        (ManagementLibrary(b"GPU \xe9", None, b"GPU 2"), [r"GPU \xe9", "GPU 2"]),
        (ManagementLibrary(), []),
        (ManagementLibrary(b"GPU", status=9), []),  # NVML_ERROR_DRIVER_NOT_LOADED
        (object(), []),
    ],
    ids=["a GPU is lost", "no GPU", "no driver", "an older library"],
)
def test_names_of_the_gpus(library: object, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_driver_library", lambda windows, linux: library)
    assert machine.gpu_names() == names


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
