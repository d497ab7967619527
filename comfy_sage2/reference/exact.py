"""Attention in full precision, tiled so that memory stays O(N D): the truth the others are measured against."""

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
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention computed and returned in `dtype`; rows that attend to nothing are 0 with an LSE of -inf.

    active_blocks: None, or bool (B | 1, Hq | 1, Tq, Tk): which blocks of 128 keys each block of 128 queries attends to.
    """
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
        repeats = q.shape[1] // k.shape[1]
        k, v = k.to(dtype), v.to(dtype)
        if repeats > 1:
            k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
        k = k.transpose(2, 3)
        key = torch.arange(k.shape[3], device=q.device)
        step = max(_TILE_SCORES // (q.shape[0] * q.shape[1] * k.shape[3]), 1)
        outs, lses = [], []
        for start in range(0, q.shape[2], step):
            scores = (q[:, :, start : start + step].to(dtype) * scale) @ k
            if attn_mask is not None:
                part = attn_mask if attn_mask.shape[2] == 1 else attn_mask[:, :, start : start + step]
                if part.dtype == torch.bool:
                    scores.masked_fill_(~part, -math.inf)
                else:
                    scores += part
            if is_causal:
                row = torch.arange(start, start + scores.shape[2], device=q.device)
                scores.masked_fill_(key > row[:, None], -math.inf)
            if active_blocks is not None:
                rows, keys = slice(start, start + scores.shape[2]), slice(0, scores.shape[3])
                mask_skipped_blocks_(scores, overlapping(active_blocks, rows, keys), rows, keys)
            lse = scores.logsumexp(dim=3)
            shift = lse.masked_fill(lse == -math.inf, 0.0)
            outs.append(scores.sub_(shift.unsqueeze(3)).exp_() @ v)
            lses.append(lse)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
