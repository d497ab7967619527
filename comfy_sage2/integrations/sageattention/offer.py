"""Whether this machine can serve the calls of `sageattention`, and with which backend; logged once."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from pathlib import Path

from ...call.signature import CallSignature, Routing
from ...dispatch.plan import Refusal, choose
from ...options import AttentionOptions
from ...system.machine import devices
from ...text import quoted

log = logging.getLogger("comfy_sage2")

NAME = "sageattention"
PATH = Path(__file__).resolve().parent / "path"  # holds the module of that name
BACKEND_VARIABLE = "COMFY_SAGE2_SAGEATTENTION_BACKEND"
VERSION = "2.2.0+comfy.sage2"  # of the interface, marked as ours; the metadata beside the module has the same
AUTOMATIC = "auto"  # an accelerated backend
REFERENCE = "reference"


def other_package() -> str | None:
    """The file of a `sageattention` that is not this pack's; None if Python finds none, or ours."""
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None or PATH in Path(spec.origin).parents:
        return None
    return spec.origin


def wanted_backend() -> str | None:
    """The backend that the user asks for: None for "auto", or "reference". ValueError for other values."""
    wanted = os.environ.get(BACKEND_VARIABLE) or AUTOMATIC
    if wanted not in (AUTOMATIC, REFERENCE):
        raise ValueError(
            f"[SA-601] the environment variable {BACKEND_VARIABLE} must be {AUTOMATIC} or {REFERENCE}, "
            f"got {quoted(wanted)}"
        )
    return None if wanted == AUTOMATIC else wanted


def serving() -> tuple[str | None, str | None]:
    """The backend that ordinary calls get on this machine's GPUs, or None and why there is none."""
    try:
        if wanted_backend() == REFERENCE:
            return REFERENCE, None
    except ValueError as error:
        return None, str(error)
    reason = None
    for device in devices():
        chosen = choose(CallSignature.minimal(device, AttentionOptions(), Routing(accelerated_only=True)))
        if not isinstance(chosen, Refusal):
            return chosen.name, None
        reason = reason or chosen.reason
    return None, reason


@cache
def refusal() -> str | None:
    """Why `import sageattention` has to fail here, or None. Logs the outcome once."""
    backend, reason = serving()
    if backend is not None:
        log.info("SageAttention2: this pack computes the attention of packs that import %s (%s)", NAME, backend)
        return None
    text = f"[SA-601] this pack cannot replace {NAME}: {reason}"
    log.warning("SageAttention2: %s. Start ComfyUI without --use-sage-attention, or install %s", text, NAME)
    return text
