"""What a calibration measures of one attention call, and the time it may take."""

from __future__ import annotations

import time

import torch

from ... import registry
from ...attention import attention, explain
from ...metrics import Agreement, compare, worst
from ...options import MODES, AttentionOptions
from ...policy.targets import VARIANTS
from ...signature import TensorForm
from ...validation import check_mask, check_tensors
from ..adapter.attention_call import AttentionCall
from .quality import Sample, evenly

# The sample of a call: so many of the batch, so many heads, and of each so many blocks of query rows. A block is the
# group of rows that smooth Q averages over, so a sampled block has the numbers that it has in the whole call.
BATCH = 2
HEADS = 2
BLOCKS = 2
BLOCK_ROWS = 128


class Budget:
    """Keeps the time spent on measuring below a share of the time that has passed, or below `least` seconds."""

    def __init__(self, share: float, least: float = 0.0) -> None:
        self.share = share
        self.least = least
        self.spent = 0.0
        self._latest = 0.0
        self._started = time.perf_counter()

    def allows(self, first: float = 0.0) -> bool:
        """Whether one more measurement stays within the share: as long as the latest, or `first` seconds."""
        expected = self._latest if self.spent > 0.0 else first
        most = max(self.share * (time.perf_counter() - self._started), self.least)
        return self.spent + expected <= most

    def add(self, seconds: float) -> None:
        """A measurement took so long."""
        self.spent += seconds
        self._latest = seconds


def checked_tensors(
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, k, v as (B, H, N, D) and the mask 4-D; TypeError or ValueError where quantized attention refuses them.

    ComfyUI's attention takes more: k and v that broadcast over the batch, for example.
    """
    q, k, v = call.tensors("BHND")
    check_tensors(TensorForm.of(q), TensorForm.of(k), TensorForm.of(v), "BHND")
    mask = call.mask_4d()
    if mask is not None:
        check_mask(TensorForm.of(mask), (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), q.device)
    return q, k, v, mask


def served_variants(call: AttentionCall, *, rotate: str = "off") -> tuple[AttentionOptions, ...]:
    """Those of VARIANTS whose mode an accelerated backend can run on `call`; all of them where none can run any.

    Raises the attention API's errors.
    """
    fast = {backend.name for backend in registry.backends() if backend.accelerated}
    served = set()
    for mode in MODES:
        options = AttentionOptions(mode, pv_accumulator="auto", rotate=rotate, scale=call.scale, layout=call.layout)
        reasons = explain(*call.tensors(), attn_mask=call.mask_4d(), options=options)
        if any(reason is None and name in fast for name, reason in reasons.items()):
            served.add(mode)
    return tuple(options for options in VARIANTS if options.mode in served) or VARIANTS


def measure_variants(call: AttentionCall, *, rotate: str = "off") -> dict[AttentionOptions, Agreement]:
    """The error of each of `served_variants` on a sample of `call`, by the backend that serves it or the reference.

    rotate: of `AttentionOptions`, for every variant; the variants that the errors are named by do not say so.
    Of several entries of the batch the worst one counts: an empty prompt may be easy, and say nothing about the other.
    Waits for the device. Raises the attention API's errors.
    """
    q, k, v, mask = checked_tensors(call)
    variants = served_variants(call, rotate=rotate)
    rows = _block_rows(q.shape[2], q.device)
    entries = evenly(q.shape[0], BATCH, q.device)
    q, k, v = (tensor.index_select(0, entries) for tensor in (q, k, v))
    if mask is not None and mask.shape[0] > 1:
        mask = mask.index_select(0, entries)
    sample = Sample.of(q, k, v, mask, evenly(q.shape[1], HEADS, q.device), rows)
    exact = sample.exact(call.scale)
    found = {}
    for options in variants:
        out = attention(
            sample.q,
            sample.k,
            sample.v,
            attn_mask=sample.mask,
            options=options,
            rotate=rotate,
            pv_accumulator="auto",  # as in the sampling that the policy will be for
            scale=call.scale,
            return_lse=False,
        )
        close = [compare(*pair, torch.float32) for pair in zip(out, exact, strict=True)]
        found[options] = worst(Agreement(*values.tolist()) for values in close)
    return found


def _block_rows(count: int, device: torch.device) -> torch.Tensor:
    """The indices of evenly spread whole blocks of `count` rows, or of all rows when they make no more blocks."""
    if count <= BLOCKS * BLOCK_ROWS:
        return torch.arange(count, device=device)
    blocks = evenly(count // BLOCK_ROWS, BLOCKS, device)
    return (blocks[:, None] * BLOCK_ROWS + torch.arange(BLOCK_ROWS, device=device)).flatten()
