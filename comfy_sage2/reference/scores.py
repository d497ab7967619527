"""The scores of one tile: integer product, dequantization, Delta S, masks."""

from __future__ import annotations

import math

import torch

from ..quantize.smoothing import expand_blocks
from .preparation import Prepared

LOG2_E = math.log2(math.e)

# A finite mask value stays finite in units of log2, so that a row of the lowest number of its type is a uniform row, as
# in plain attention, and not an empty one.
LOWEST_MASK_TERM = torch.finfo(torch.float32).min / 2


def tile_scores(prepared: Prepared, rows: slice, keys: slice, scale: float, block_q: int) -> torch.Tensor:
    """Scores of the query tokens `rows` with the key tokens `keys`, times scale * log2(e): (B, Hq, rows, keys).

    They lack q . k_mean, which is the same for a whole row (section 3.1). `rows` starts at a multiple of `block_q`.
    """
    q_scale = prepared.q.scale[:, :, rows] * (scale * LOG2_E)
    scores = grouped_product(prepared.q.values[:, :, rows], prepared.k.values[:, :, keys])
    scores.mul_(q_scale)
    by_kv_head = scores.unflatten(1, (prepared.k.scale.shape[1], -1))
    by_kv_head.mul_(prepared.k.scale[:, :, None, keys].transpose(3, 4))
    if prepared.q_block_means is not None:
        blocks = slice(rows.start // block_q, math.ceil(rows.stop / block_q))
        delta = grouped_product(prepared.q_block_means[:, :, blocks], prepared.k_smooth[:, :, keys])
        scores.add_(expand_blocks(delta, block_q, rows.stop - rows.start), alpha=scale * LOG2_E)
    return scores


def grouped_product(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q (B, Hq, M, D) times the transpose of k (B, Hkv, N, D), each K head serving Hq / Hkv Q heads: (B, Hq, M, N)."""
    batch, q_heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    stacked = q.reshape(batch * kv_heads, q_heads // kv_heads * rows, -1)
    return torch.bmm(stacked, k.flatten(0, 1).transpose(1, 2)).view(batch, q_heads, rows, -1)


def mask_scores_(
    scores: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, rows: slice, keys: slice
) -> torch.Tensor:
    """Apply the 4-D mask (bool, or additive in natural units) and the causal mask to a tile of scores in place."""
    if attn_mask is not None:
        part = attn_mask if attn_mask.shape[2] == 1 else attn_mask[:, :, rows]
        part = part if part.shape[3] == 1 else part[..., keys]
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, -math.inf)
        else:
            part = part.float()
            term = (part * LOG2_E).clamp_(min=LOWEST_MASK_TERM)
            scores.add_(term.masked_fill_(part == -math.inf, -math.inf))
    if is_causal and keys.stop - 1 > rows.start:
        row = torch.arange(rows.start, rows.stop, device=scores.device)
        key = torch.arange(keys.start, keys.stop, device=scores.device)
        scores.masked_fill_(key > row[:, None], -math.inf)
    return scores
