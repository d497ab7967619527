"""The tail of a call with block lists: what it left out takes part by means of its tokens."""

from __future__ import annotations

import torch

from ..backends import pooled_tail
from ..block_mask import BlockMask
from ..reference.pooled_tail import add_pooled_tail_ as add_by_reference_


def add_pooled_tail_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_mask: BlockMask,
    *,
    scale: float,
    layout: str = "BHND",
) -> None:
    """Correct `out` and `lse`, which a call with these tensors and block mask has returned, in place.

    See `reference.pooled_tail.add_pooled_tail_`. On GPUs whose kernel module has the kernels for it these compute it,
    with means in bfloat16 and all sums in float32.

    Args:
        q, k, v, out: (B, H, N, D), or (B, N, H, D) with layout "BNHD"; fp16, bf16 or fp32.
        lse: (B, Hq, Nq) float32, contiguous. A call with masks has no use for a tail: it knows nothing of them.
        block_mask: that of the call.
        scale: softmax scale of the call, positive.

    Raises:
        ValueError: the layout is another one, or the LSE is not as above.
    """
    if layout == "BNHD":
        q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, out))
    elif layout != "BHND":
        raise ValueError(f"[SA-211] layout must be 'BHND' or 'BNHD', got {layout!r}")
    if lse.shape != q.shape[:3] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(
            f"[SA-211] lse must be contiguous float32 of shape {tuple(q.shape[:3])}, got {lse.dtype} "
            f"{tuple(lse.shape)} with strides {lse.stride()}"
        )
    if not pooled_tail.add_(q, k, v, out, lse, block_mask.lists, scale):
        add_by_reference_(q, k, v, out, lse, block_mask.to_dense(), scale=scale)
