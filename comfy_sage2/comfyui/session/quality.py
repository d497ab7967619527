"""How close attention outputs are to full precision, on a bounded sample of heads and query rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from ... import metrics
from ...call.call_site import CallSite
from ..adapter import memory
from ..adapter.attention_call import AttentionCall, Fallback
from .model_passes import ModelPass
from .recorder import Recorder
from .timer import start_timer

_NO_MEMORY = "the GPU has too little free memory to "
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
    """What `metrics.compare` gives of `out`, (B, Hq, Nq, D), at the sampled rows of all batches, on the device.

    The other arguments are those of `metrics.exact_rows`.
    """
    heads = metrics.spread(q.shape[1], HEADS, torch.device("cpu")).tolist()
    rows = metrics.spread(q.shape[2], ROWS, q.device)
    sampled = torch.cat([out[:, head, None].index_select(2, rows) for head in heads], dim=1)
    return metrics.compare(sampled, metrics.exact_rows(q, k, v, heads, rows, scale=scale, mask=mask), torch.float32)


def compare(
    call: AttentionCall,
    out: torch.Tensor,
    site: CallSite,
    model_pass: ModelPass,
    record: Recorder,
    warn: Callable[[str], None],
) -> None:
    """Record how close the output of a call is to full precision."""
    try:
        with memory.unrecorded():
            tensors = (call.as_bhnd(out), *call.tensors("BHND"))
            agreement = measure(*tensors, scale=call.scale, mask=call.mask_4d())
            record.add_agreement(site.layer, site.step, model_pass.keep(agreement))
    except torch.cuda.OutOfMemoryError:  # the sampling itself has what it needs
        warn(f"{_NO_MEMORY}compare every call with full precision. The report leaves these calls out")


def time_comfyui(
    fallback: Fallback, work: Hashable, device: torch.device, record: Recorder, warn: Callable[[str], None]
) -> None:
    """Record how long ComfyUI's attention takes for work that only backends have served so far."""
    timer = start_timer(device)
    try:
        with memory.unrecorded():
            fallback()
    except torch.cuda.OutOfMemoryError:
        warn(f"{_NO_MEMORY}time ComfyUI's attention. The report may lack the comparison with it")
        return
    timer.stop()
    record.add_comparison(work, timer)
