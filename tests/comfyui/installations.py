"""Where ComfyUI lies on this machine, which version it is, and the Python that starts it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tools.comfyui.folders import CLONE, OVERLAY, OVERLAY_RECORD, USUAL

REPOSITORY = Path(__file__).resolve().parents[2]
NEWEST = (0, 33, 0)  # the version that all workflows are made for; older ones lack the newer models
_VERSION_FILES = ("comfyui_version.py", "pyproject.toml")  # the oldest versions have the second one only
_VERSION = re.compile(r'^(?:__version__|version) *= *"(\d+)\.(\d+)\.(\d+)"', re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """A folder that may hold a ComfyUI.

    Attributes:
        root: the folder.
        named: whether COMFYUI_PATH names it.
    """

    root: Path
    named: bool = False

    @property
    def version(self) -> tuple[int, int, int] | None:
        """What the folder's own files say; None when they say nothing."""
        for name in _VERSION_FILES:
            path = self.root / name
            found = _VERSION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
            if found is not None:
                return int(found[1]), int(found[2]), int(found[3])
        return None

    @property
    def name(self) -> str:
        """For test reports: the version, or the folder's name where there is none."""
        if self.version is None:
            return self.root.name
        return f"ComfyUI {'.'.join(map(str, self.version))}{' with newer files' if self.is_overlay else ''}"

    @property
    def is_overlay(self) -> bool:
        """Whether single newer files lie over that version."""
        return (self.root / OVERLAY_RECORD).is_file()

    @property
    def is_newest(self) -> bool:
        """Whether it is as new as the workflows need."""
        return self.version is not None and self.version >= NEWEST

    @property
    def reason_missing(self) -> str | None:
        """Why it cannot be tested, or None when it can."""
        if not (self.root / "main.py").is_file():
            if self.root.name == OVERLAY:
                return f"no ComfyUI with newer files at {self.root}: make it by `python -m tools.comfyui.overlay`"
            return f"no ComfyUI at {self.root}: put one there, or name another folder in COMFYUI_PATH"
        if self.version is None:
            return f"the ComfyUI at {self.root} does not say its version in {' or '.join(_VERSION_FILES)}"
        if not comfyui_python().is_file():
            command = f"python -m tools.comfyui.environment --venv .venv-host --comfyui {self.root}"
            return f"no Python for ComfyUI at {comfyui_python()}: run `{command}`"
        return None


def installations() -> list[Installation]:
    """The folders to test: those that COMFYUI_PATH lists, then the usual ones, unless a listed one has their version.
    Where there is none, the clone that `make test` made.

    A listed folder that cannot be tested stays in the list, so that it is seen.
    """
    named = [Path(part) for part in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if part]
    found = [Installation(path, named=True) for path in dict.fromkeys(path.expanduser().absolute() for path in named)]
    taken = {entry.version for entry in found} - {None} | {entry.root for entry in found}
    usual = [Installation(Path.home() / name) for name in USUAL]
    if not named and (CLONE / "main.py").is_file() and not any((one.root / "main.py").is_file() for one in usual):
        usual[0] = Installation(CLONE)
    return found + [entry for entry in usual if entry.root not in taken and entry.version not in taken]


def comfyui_python() -> Path:
    """The interpreter that has ComfyUI's requirements; COMFY_SAGE2_HOST_PYTHON names another one than .venv-host's."""
    inside = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return Path(os.environ.get("COMFY_SAGE2_HOST_PYTHON", REPOSITORY / ".venv-host" / inside))
