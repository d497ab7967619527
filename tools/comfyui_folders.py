"""Print the ComfyUI folders on this machine, one a line: those of COMFYUI_PATH, then the usual ones in the home folder.

COMFYUI_PATH may list several, separated as in PATH. Nothing is printed when there is none.
"""

from __future__ import annotations

import os
from pathlib import Path

USUAL = ("ComfyUI", "ComfyUI-0.8.0", "ComfyUI-0.3.64")


def comfyui_folders() -> list[Path]:
    """The folders that hold a ComfyUI; raises SystemExit when COMFYUI_PATH names one that does not."""
    named = [Path(part) for part in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if part]
    for path in named:
        if not (path / "main.py").is_file():
            raise SystemExit(f"COMFYUI_PATH names {path}, but there is no main.py: name the folder that holds it")
    usual = [Path.home() / name for name in USUAL]
    return list(dict.fromkeys([*named, *(path for path in usual if (path / "main.py").is_file())]))


if __name__ == "__main__":
    print("\n".join(map(str, comfyui_folders())))
