"""Other people's node packs, for tests/comfyui/stacks: clones in the folder that COMFY_SAGE2_PACKS names."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "COMFY_SAGE2_PACKS"
KJNODES, GGUF, WAN_WRAPPER = PACKS = ("ComfyUI-KJNodes", "ComfyUI-GGUF", "ComfyUI-WanVideoWrapper")


def folder() -> Path | None:
    """The folder with the clones, or None if the variable is not set."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else None


def clone(pack: str) -> Path:
    """The folder of a pack's clone, which must exist."""
    clones = folder()
    assert clones is not None
    return clones / pack


def reason_missing(pack: str) -> str | None:
    """Why a pack cannot be tested, or None if it can."""
    clones = folder()
    if clones is None:
        return f"{VARIABLE} names no folder with a clone of {pack}"
    return None if (clones / pack / "__init__.py").is_file() else f"there is no clone of {pack} in {clones}"
