"""Print this machine's ComfyUI folders, one per line: those in COMFYUI_PATH, else the usual ones in the home folder.

    python -m tools.comfyui.folders

COMFYUI_PATH may list several, newest first, separated as in PATH. If there are none in either place, this prints the
clones in build/ that `make test` and `make demo` make, if any.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

OVERLAY = "ComfyUI-overlay"  # the newest release with some newer files; tools.comfyui.overlay makes it
OVERLAY_RECORD = "overlay.json"  # marks a folder as an overlay
USUAL = ("ComfyUI", "ComfyUI-0.8.0", "ComfyUI-0.3.64", OVERLAY)
BUILD = Path(__file__).resolve().parents[2] / "build"
OLDEST_FOR_DEMO = (0, 8)  # earlier versions load only VAEs of Wan's full width


def comfyui_folders() -> list[Path]:
    """The folders that hold a ComfyUI; raises SystemExit when COMFYUI_PATH names one that does not."""
    from_variable = [Path(part).expanduser() for part in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if part]
    for path in from_variable:
        if not (path / "main.py").is_file():
            raise SystemExit(f"COMFYUI_PATH names {path}, but there is no main.py: name the folder that holds it")
    usual = [Path.home() / name for name in USUAL]
    for folders in (from_variable, usual, sorted(BUILD.glob("ComfyUI-v*"))):
        present = [path.absolute() for path in dict.fromkeys(folders) if (path / "main.py").is_file()]
        if present:
            return present
    return []


def comfyui_folder(text: str) -> Path:
    """Type of a command line argument: the folder of a ComfyUI."""
    path = Path(text)
    if not (path / "main.py").is_file():
        raise argparse.ArgumentTypeError(f"expected a folder that holds ComfyUI's main.py, got {text!r}")
    return path


def comfyui_version(root: Path) -> tuple[int, ...]:
    """The version of the ComfyUI at `root`, for ordering. SystemExit when it states none."""
    version_file = root / "comfyui_version.py"
    text = version_file.read_text(encoding="utf-8") if version_file.is_file() else ""
    version = re.search(r'__version__\s*=\s*"([\d.]+)', text)
    if version is None:
        raise SystemExit(f"{version_file} states no version: is {root} the folder of ComfyUI 0.3 or newer?")
    return tuple(int(part) for part in version[1].strip(".").split("."))


def reason_too_old_for_demo(root: Path) -> str | None:
    """Why the ComfyUI at `root` cannot run the demo, or None when it can."""
    if comfyui_version(root) >= OLDEST_FOR_DEMO:
        return None
    return f"the ComfyUI at {root} is older than 0.8.0: it cannot load the demo's small VAE"


if __name__ == "__main__":
    print("\n".join(map(str, comfyui_folders())))
