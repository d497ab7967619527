"""Where this user's findings lie."""

from __future__ import annotations

from .findings import Findings
from .kernels.unpack import user_cache


def user_findings() -> Findings:
    """The file in the user's folder for caches; without one nothing is kept."""
    folder = user_cache()
    return Findings(None if folder is None else folder / "comfy_sage2" / "findings.json")
