"""The ComfyUIs on this machine, which version each is, and the Python that starts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tools.comfyui.folders import OVERLAY_RECORD, comfyui_folders, comfyui_version

REPOSITORY = Path(__file__).resolve().parents[2]
NEWEST = (0, 33, 0)  # the version that all workflows are made for; older ones lack the newer models


@dataclass(frozen=True)
class Installation:
    """A ComfyUI in the folder `root`."""

    root: Path

    @property
    def name(self) -> str:
        """Its version, for test reports."""
        version = ".".join(map(str, comfyui_version(self.root)))
        return f"ComfyUI {version}{' with newer files' if self.is_overlay else ''}"

    @property
    def is_overlay(self) -> bool:
        """Whether single newer files lie over that version."""
        return (self.root / OVERLAY_RECORD).is_file()

    @property
    def is_newest(self) -> bool:
        """Whether it is as new as the workflows need."""
        return comfyui_version(self.root) >= NEWEST

    @property
    def reason_missing(self) -> str | None:
        """Why it cannot be tested, or None when it can."""
        if comfyui_python().is_file():
            return None
        return f"no Python for ComfyUI at {comfyui_python()}: run `make host-environment`"


def installations() -> list[Installation]:
    """The ComfyUIs to test."""
    return [Installation(folder) for folder in comfyui_folders()]


def comfyui_python() -> Path:
    """The interpreter that has ComfyUI's requirements; COMFY_SAGE2_HOST_PYTHON names another one than .venv-host's."""
    inside = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return Path(os.environ.get("COMFY_SAGE2_HOST_PYTHON", REPOSITORY / ".venv-host" / inside))
