"""How close attention outputs are to full precision, on a bounded sample of heads and query rows."""

from __future__ import annotations

import torch

from ... import metrics
from ...call.call_site import CallSite
from ...text import error_text
from ..adapter import memory
from ..adapter.attention_call import AttentionCall, Fallback
from .model_passes import ModelPass
from .timer import start_timer

# At most this many heads and query rows of each are compared: 8 x 256 rows cost little beside a long video's attention.
HEADS = 8
ROWS = 256


def measure(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`metrics.compare` of `out`, (B, Hq, Nq, D), at sampled rows of all batches; the rest as in `exact_rows`."""
    heads = metrics.spread(q.shape[1], HEADS, torch.device("cpu")).tolist()
    rows = metrics.spread(q.shape[2], ROWS, q.device)
    sampled = torch.cat([out[:, head, None].index_select(2, rows) for head in heads], dim=1)
    return metrics.compare(sampled, metrics.exact_rows(q, k, v, heads, rows, scale=scale, mask=mask), torch.float32)


def compare(call: AttentionCall, out: torch.Tensor, site: CallSite, model_pass: ModelPass) -> None:
    session = model_pass.session
    try:
        with memory.unrecorded():
            tensors = (call.as_bhnd(out), *call.tensors("BHND"))
            agreement = measure(*tensors, scale=call.scale, mask=call.mask_4d())
            session.record.add_agreement(site.layer, site.step, model_pass.keep(agreement))
    except RuntimeError as error:
        if not memory.found_none(error):
            raise
        # The sampling itself can go on.
        session.dispatcher.warn_once(
            "the GPU has too little free memory to compare every call with full precision. The report leaves these "
            "calls out"
        )


def time_comfyui(call: AttentionCall, fallback: Fallback, model_pass: ModelPass) -> None:
    """Record ComfyUI's time for a call that a backend is about to serve; the output is freed before that begins."""
    tensors = [container.tensor for container in call.containers]
    timer = start_timer(call.q.device)
    try:
        with memory.unrecorded():
            fallback()
        timer.stop()
        model_pass.session.record.add_comparison(call.form, timer)
    except Exception as error:  # such as too little memory, or a form it does not take; the backend may serve the call
        warn = model_pass.session.dispatcher.warn_once
        warn(f"ComfyUI's attention could not be timed for the report: {error_text(error)}")
    finally:
        for container, tensor in zip(call.containers, tensors, strict=True):
            container.tensor = tensor
