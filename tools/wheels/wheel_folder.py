"""The folder of released wheels."""

from __future__ import annotations

from pathlib import Path

WHEELS = Path(__file__).resolve().parent.parent.parent / "wheels"
HOST = "host"


def wheels_of(part: str, folder: Path | None = None) -> list[Path]:
    """The wheels of an architecture, or of HOST, in a folder; by default the released ones."""
    return sorted((folder or WHEELS).glob(f"comfy_sage2_{part}-*.whl"))


def wheels_for(architecture: str, platform_tag: str, folder: Path | None = None) -> list[Path]:
    """The wheels that an architecture's kernels need on a platform: its images and the host modules."""
    wheels = [*wheels_of(architecture, folder), *wheels_of(HOST, folder)]
    return [wheel for wheel in wheels if wheel.stem.endswith(("-any", platform_tag))]
