"""Where ComfyUI may lie on this machine, and the Python that starts it."""

from __future__ import annotations

import os
from pathlib import Path

from tools.comfyui.folders import USUAL

REPOSITORY = Path(__file__).resolve().parents[2]


def candidates() -> dict[str, Path]:
    """The ComfyUI folders to look for, by the name they have in test reports; COMFYUI_PATH may list several."""
    named = [Path(part) for part in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if part]
    usual = [Path.home() / name for name in USUAL]
    return {path.name: path for path in (*named, *usual)}


def reason_missing(root: Path) -> str | None:
    """Why `root` cannot be tested, or None when it can."""
    if not (root / "main.py").is_file():
        return f"no ComfyUI at {root}: put one there, or name another folder in COMFYUI_PATH"
    if not host_python().is_file():
        command = f"python -m tools.comfyui.environment --venv .venv-host --comfyui {root}"
        return f"no Python for ComfyUI at {host_python()}: run `{command}`"
    return None


def host_python() -> Path:
    """The interpreter that has ComfyUI's requirements; COMFY_SAGE2_HOST_PYTHON names another one than .venv-host's."""
    inside = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return Path(os.environ.get("COMFY_SAGE2_HOST_PYTHON", REPOSITORY / ".venv-host" / inside))
