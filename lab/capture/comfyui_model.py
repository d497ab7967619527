"""Capturing from a ComfyUI model: what the two capture nodes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import override_before_ours, with_handler

from .handler import Capture
from .recorder import CaptureBounds, CaptureError


def captured_model(model: Any, bounds: CaptureBounds) -> Any:
    """A clone of `model` of whose next sampling some attention calls are kept, within `bounds`."""
    return with_handler(model, Capture(bounds), override_before_ours(model))


def save_capture(model: Any, folder: Path, name: str) -> str:
    """Write what the last sampling of `model` gave to the file `name` in `folder`; in words what and where.

    Raises ValueError when `name` is not a plain file name, CaptureError when nothing was kept.
    """
    for session in reversed(sessions_of(model)):
        if isinstance(session.handler, Capture):
            return session.handler.save(folder, name)
    raise CaptureError(
        "[SA-403] this model did not go through SageAttention2 Capture. Connect its output to this node."
    )
