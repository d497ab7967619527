"""The ComfyUIs on this machine, their versions, and the Python that starts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tools.comfyui.folders import OVERLAY_RECORD, comfyui_folders, comfyui_version

REPOSITORY = Path(__file__).resolve().parents[2]
NEWEST = (0, 33, 0)  # older versions lack models of the shipped workflows


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
        """Whether some of its files come from a newer version."""
        return (self.root / OVERLAY_RECORD).is_file()

    @property
    def is_newest(self) -> bool:
        """Whether it is new enough for all workflows."""
        return comfyui_version(self.root) >= NEWEST

    @property
    def reason_missing(self) -> str | None:
        """Why it cannot be tested, or None if it can."""
        if comfyui_python().is_file():
            return None
        return f"no Python for ComfyUI at {comfyui_python()}: run `make host-environment`"


def installations() -> list[Installation]:
    """The ComfyUIs to test."""
    return [Installation(folder) for folder in comfyui_folders()]


def comfyui_python() -> Path:
    """The interpreter with ComfyUI's requirements: COMFY_SAGE2_HOST_PYTHON, or else that of .venv-host."""
    executable = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return Path(os.environ.get("COMFY_SAGE2_HOST_PYTHON", REPOSITORY / ".venv-host" / executable))
