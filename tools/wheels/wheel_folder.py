"""The folder of released wheels."""

from __future__ import annotations

from pathlib import Path

WHEELS = Path(__file__).resolve().parent.parent.parent / "wheels"


def wheels_of(architecture: str, folder: Path | None = None) -> list[Path]:
    """The wheels of an architecture in a folder, by default the one of the released wheels."""
    return sorted((folder or WHEELS).glob(f"comfy_sage2_{architecture}-*.whl"))
