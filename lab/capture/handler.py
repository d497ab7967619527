"""Keeping Q, K and V of an ordinary sampling, for `python -m lab eval --capture`."""

from __future__ import annotations

import logging
from pathlib import Path

from comfy_sage2.call_site import CallSite
from comfy_sage2.comfyui.adapter import memory
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.session.handler import Handler
from comfy_sage2.comfyui.session.measurement import checked_tensors
from comfy_sage2.comfyui.session.record import Decision, Summary
from comfy_sage2.text import check_file_name, error_text

from .recorder import CaptureBounds, CaptureError, Recorder

log = logging.getLogger("comfy_sage2")

CAPTURING = "capture: sampled in full precision"
SUFFIX = ".safetensors"


class Capture(Handler):
    """The handler of the *SageAttention2 Capture* node: ComfyUI's attention serves every call, and some are kept.

    Only self-attention is kept. `recorder` holds those of the last sampling; `left_out` layer -> why it was not kept.
    """

    title = CAPTURING
    leaves_to_declared = False

    def __init__(self, bounds: CaptureBounds) -> None:
        self._bounds = bounds
        self.begin_sampling(1)
        self.end_sampling()

    def begin_sampling(self, steps: int) -> None:
        """See `Handler.begin_sampling`; what an earlier sampling gave is forgotten."""
        self.recorder = Recorder(self._bounds)
        self.left_out: dict[int, str] = {}
        self._sampling = True

    def end_sampling(self) -> None:
        """See `Handler.end_sampling`."""
        self._sampling = False

    def choose(self, call: AttentionCall, site: CallSite) -> Decision:
        """See `Handler.choose`; keeps `call` if it is one of those to keep."""
        if self._sampling and site.is_self and self.recorder.wants(site.layer, site.step):
            reason = self._keep(call, site)
            if reason is not None:
                self.left_out[site.layer] = reason
        return Decision(reason=f"[SA-309] {CAPTURING}")

    def own_headline(self, summary: Summary) -> str:
        """See `Handler.own_headline`."""
        return f"{CAPTURING}, and {len(self.recorder.samples)} attention calls kept"

    def _keep(self, call: AttentionCall, site: CallSite) -> str | None:
        """Keep `call`, or say why it cannot be kept."""
        if call.unknown:
            return f"[SA-408] arguments that this version does not know: {', '.join(call.unknown)}"
        try:
            q, k, v, mask = checked_tensors(call)
        except (TypeError, ValueError) as error:
            return str(error)
        try:
            with memory.unrecorded():
                self.recorder.add(q, k, v, layer=site.layer, step=site.step, scale=call.scale, mask=mask)
        except RuntimeError as error:  # no memory for the copy, here or on the GPU: the sampling itself must go on
            return f"[SA-408] it could not be copied: {error_text(error)}"
        return None

    def save(self, folder: Path, name: str) -> str:
        """Write what the last sampling gave to the file `name` in `folder`, and say in words what and where.

        Raises ValueError when `name` is not a plain file name, CaptureError when nothing was kept.
        """
        path = folder / (check_file_name(name, SUFFIX) + SUFFIX)
        samples = self.recorder.samples
        reasons = [f"Left out: {reason}" for reason in sorted(set(self.left_out.values()))]
        if self.recorder.left_out:
            reasons.insert(0, f"{self.recorder.left_out} calls would not have fitted into most_megabytes.")
        if reasons and not samples:
            raise CaptureError("\n".join(["[SA-404] nothing was captured:", *reasons]))
        folder.mkdir(parents=True, exist_ok=True)
        self.recorder.save(path)
        layers, steps = {sample.layer for sample in samples}, {sample.step for sample in samples}
        size = path.stat().st_size / 1e6
        log.info("SageAttention2: captured %s", path.name)
        return "\n".join(
            [
                f"{len(samples)} attention calls of {len(layers)} layers and {len(steps)} steps, {size:.0f} MB: {path}",
                *reasons,
                f"Measure it with: python -m lab eval --only capture --capture {path.name}",
            ]
        )
