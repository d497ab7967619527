"""Keeping Q, K and V of an ordinary sampling, for `python -m lab eval --capture`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...capture.recorder import CaptureBounds, CaptureError, Recorder
from ..call.attention_call import HostCall
from ..call.forwards import Forward
from ..report import stopwatch
from ..report.statistics import Outcome
from ..sampling import sessions_of
from ..serve.selection import Selection
from ..serve.session import Override, Session, log
from ..settings import Settings

CAPTURING = "capture: sampled in full precision"
SUFFIX = ".safetensors"


class Capture(Session):
    """One *SageAttention2 Capture* node at work: a session that leaves every call to the host and keeps some of them.

    Only self-attention is kept. `recorder` holds what the last sampling gave; `left_out` layer -> why it was not kept.
    """

    task = CAPTURING

    def __init__(self, bounds: CaptureBounds, slot: int, previous: Override | None) -> None:
        super().__init__(Settings(), Selection("capture", None), slot, previous)
        self.recorder = Recorder(bounds)
        self.left_out: dict[int, str] = {}

    def begin_sampling(self, sigmas: Sequence[float]) -> None:
        """See `Session.begin_sampling`; what an earlier sampling gave is forgotten."""
        super().begin_sampling(sigmas)
        self.recorder = Recorder(self.recorder.bounds)
        self.left_out = {}

    def attend(self, call: HostCall, forward: Forward, fallback: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Keep the call if it is one of those to keep, and serve it by the host."""
        layer = forward.next_layer(call.head_dim)
        if call.is_self_attention and self.recorder.wants(layer, forward.step):
            self._keep(call, layer, forward.step)
        watch = stopwatch.start(call.q.device)
        out = fallback()
        watch.stop()
        self.statistics.record(layer, forward.step, Outcome(reason=CAPTURING), watch, None)
        return out

    def _keep(self, call: HostCall, layer: int, step: int) -> None:
        if call.unknown:
            self.left_out[layer] = f"arguments that this version does not know: {', '.join(call.unknown)}"
            return
        try:
            q, k, v = call.tensors()
        except ValueError as error:
            self.left_out[layer] = str(error)
            return
        if call.layout == "BNHD":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        try:
            self.recorder.add(q, k, v, layer=layer, step=step, scale=call.scale, mask=call.mask_4d())
        except RuntimeError as error:  # no memory for the copy, here or on the GPU: the sampling itself must go on
            self.left_out[layer] = f"it could not be copied: {error}"


def save_capture(model: Any, folder: Path, name: str) -> str:
    """Write what the last sampling of `model` gave to `folder`, and say in words what and where.

    CaptureError when `model` did not go through the node or nothing was kept, or when `name` is not a plain file name.
    """
    captures = [session for session in sessions_of(model) if isinstance(session, Capture)]
    if not captures:
        raise CaptureError("this model did not go through SageAttention2 Capture. Connect its output to this node.")
    name = name.strip()
    if not name or Path(name).name != name or name.startswith("."):
        raise CaptureError(f"file must be a plain file name without folders, got {name!r}. Choose another name.")
    path = folder / name.removesuffix(SUFFIX)
    path = path.with_name(path.name + SUFFIX)
    capture = captures[-1]
    samples = capture.recorder.samples
    reasons = [f"Left out: {reason}" for reason in sorted(set(capture.left_out.values()))]
    if capture.recorder.left_out:
        reasons.insert(0, f"{capture.recorder.left_out} calls would not have fitted into most_megabytes.")
    if reasons and not samples:
        raise CaptureError("\n".join(["nothing was captured:", *reasons]))
    folder.mkdir(parents=True, exist_ok=True)
    capture.recorder.save(path)
    places = {sample.layer for sample in samples}, {sample.step for sample in samples}
    size = path.stat().st_size / 1e6
    text = (
        f"{len(samples)} attention calls of {len(places[0])} layers and {len(places[1])} steps, {size:.0f} MB: {path}"
    )
    text = "\n".join([text, *reasons])
    log.info("SageAttention2: captured %s", path.name)
    return f"{text}\nMeasure it with: python -m lab eval --only capture --capture {path.name}"
