"""Attention in full precision, with which the others are compared, tiled so that memory stays O(N D)."""

from __future__ import annotations

import math

import torch

from .active_blocks import mask_skipped_blocks_, overlapping

_TILE_SCORES = 1 << 22


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    active_blocks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention computed and returned in `dtype`, with gradients: the output and the LSE (…, H, N).

    q, k, v: (…, H, N, D), where each head of k and v is for a group of q's, or (N, D).
    attn_mask: None, or bool (True = attend) or additive, of at least two dimensions.
    active_blocks: None, or bool (B | 1, Hq | 1, Tq, Tk): which blocks of 128 keys each block of 128 queries attends to.

    Rows that attend to nothing are 0 with an LSE of -inf.
    """
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        k, v = k.to(dtype), v.to(dtype)
        repeats = group_size(q, k)
        if repeats > 1:
            k, v = (tensor.repeat_interleave(repeats, dim=-3) for tensor in (k, v))
        k = k.transpose(-2, -1)
        key = torch.arange(k.shape[-1], device=q.device)
        step = max(_TILE_SCORES // max(math.prod(q.shape[:-2]) * k.shape[-1], 1), 1)
        outs, lses = [], []
        for start in range(0, max(q.shape[-2], 1), step):
            scores = (q[..., start : start + step, :].to(dtype) * scale) @ k
            if attn_mask is not None:
                part = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., start : start + step, :]
                scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part.to(dtype)
            if is_causal:
                row = torch.arange(start, start + scores.shape[-2], device=q.device)
                scores = scores.masked_fill(key > row[:, None], -math.inf)
            if active_blocks is not None:
                rows, keys = slice(start, start + scores.shape[2]), slice(0, scores.shape[3])
                mask_skipped_blocks_(scores, overlapping(active_blocks, rows, keys), rows, keys)
            lse = scores.logsumexp(dim=-1)
            is_empty = (lse == -math.inf)[..., None]
            weights = (scores - lse[..., None].masked_fill(is_empty, 0.0)).exp()
            # For a row at the lowest number of a mask, the LSE is rounded so much that the weights do not sum to 1.
            weights = weights / weights.sum(dim=-1, keepdim=True).masked_fill(is_empty, 1.0)
            outs.append(torch.nn.functional.dropout(weights, dropout_p) @ v)
            lses.append(lse)
        return torch.cat(outs, dim=-2), torch.cat(lses, dim=-1)


def group_size(q: torch.Tensor, k: torch.Tensor) -> int:
    """How many heads of q share one of k; also 1 if one head of q is for all heads of k."""
    if q.dim() < 3 or k.dim() < 3:
        return 1
    q_heads, kv_heads = q.size(-3), k.size(-3)  # nested tensors have no shape
    return q_heads // kv_heads if kv_heads and q_heads % kv_heads == 0 else 1
