"""Install the frontend that each ComfyUI's requirements pin into build/frontends.

All ComfyUIs share one environment, which can hold only one version.

    python -m tools.comfyui.frontends

COMFY_SAGE2_FRONTEND sets another version for all of them, or "newest".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .folders import BUILD, comfyui_folders

PACKAGE = "comfyui-frontend-package"
NEWEST = "newest"


def frontend_version(root: Path) -> str:
    """The frontend version for the ComfyUI at `root`. SystemExit when its requirements pin none."""
    text = (root / "requirements.txt").read_text(encoding="utf-8")
    pinned = re.search(rf"^{PACKAGE}==([\d.]+)", text, re.MULTILINE)
    version = os.environ.get("COMFY_SAGE2_FRONTEND") or (pinned[1] if pinned else None)
    if not version:
        raise SystemExit(f"{root / 'requirements.txt'} pins no {PACKAGE}: name a version in COMFY_SAGE2_FRONTEND")
    return version


def frontend_folder(version: str) -> Path:
    """The folder with the files of this version, for ComfyUI's --front-end-root."""
    return BUILD / "frontends" / version / "comfyui_frontend_package" / "static"


def install(version: str) -> None:
    """Install a version into its folder, unless it is there. CalledProcessError when pip fails."""
    if frontend_folder(version).is_dir() and version != NEWEST:
        return
    wanted = PACKAGE if version == NEWEST else f"{PACKAGE}=={version}"
    target = BUILD / "frontends" / version
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(target)]
    subprocess.run([*pip, wanted], check=True)


if __name__ == "__main__":
    for version in dict.fromkeys(map(frontend_version, comfyui_folders())):
        install(version)
        print(frontend_folder(version))
