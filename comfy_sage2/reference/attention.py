"""Algorithm 1 of the SageAttention2 paper: tiles of queries, online softmax over blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .options import ReferenceOptions
from .preparation import Prepared, prepare
from .scores import grouped_product, mask_scores_, tile_scores
from .softmax import OnlineSoftmax

# Scores held at a time over all heads: large enough to hide PyTorch's cost a call, small enough for a CPU's cache.
_TILE_SCORES = 1 << 19
_TILE_SCORES_ON_GPU = 1 << 26


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ReferenceOptions | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised attention with the numerics of `options`, in memory O(N D) plus one tile.

    Args:
        q: (B, Hq, Nq, D); k: (B, Hkv, Nkv, D); v: (B, Hkv, Nkv, Dv); any float dtype.
        options: None is SageAttn2-8b with the paper's groups.
        scale: softmax scale, None is 1/sqrt(D).
        is_causal: query i attends to keys 0..i.
        attn_mask: None or 4-D, broadcasting to (B, Hq, Nq, Nkv): bool (True = attend) or additive.

    Returns:
        out (B, Hq, Nq, Dv) float32 and lse (B, Hq, Nq) float32, the natural log-sum-exp of the scaled scores.
    """
    options = ReferenceOptions() if options is None else options
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    # Products of whole numbers in float32 are exact; under autocast they would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        prepared = prepare(q, k, v, options)
        outs, lses = [], []
        for rows in _row_tiles(q, options):
            softmax = OnlineSoftmax(q.shape[0], q.shape[1], rows.stop - rows.start, prepared.v, options)
            kv_length = min(k.shape[2], rows.stop) if is_causal else k.shape[2]
            for keys in _key_steps(kv_length, options):
                scores = tile_scores(prepared, rows, keys, scale, options.groups.block_q)
                softmax.add(mask_scores_(scores, attn_mask, is_causal, rows, keys), keys)
            outs.append(softmax.output(prepared.v_mean))
            lse = softmax.log_sum_exp() + _dropped_term(q[:, :, rows], prepared, scale)
            if attn_mask is not None and attn_mask.dtype != torch.bool:
                # Where the mask's lowest number was cut to what float32 holds in units of log2.
                lse = lse.masked_fill(softmax.is_lowest(), torch.finfo(attn_mask.dtype).min)
            lses.append(lse)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _row_tiles(q: torch.Tensor, options: ReferenceOptions) -> Iterator[slice]:
    block_q = options.groups.block_q
    tile = _TILE_SCORES_ON_GPU if q.is_cuda else _TILE_SCORES
    rows = tile // (q.shape[0] * q.shape[1] * _keys_per_step(options))
    rows = max(rows // block_q, 1) * block_q
    for start in range(0, q.shape[2], rows):
        yield slice(start, min(start + rows, q.shape[2]))


def _keys_per_step(options: ReferenceOptions) -> int:
    return options.groups.block_k if options.keys_per_step is None else options.keys_per_step


def _key_steps(kv_length: int, options: ReferenceOptions) -> Iterator[slice]:
    step = _keys_per_step(options)
    starts = range(0, kv_length, step)
    for start in reversed(starts) if options.last_keys_first else starts:
        yield slice(start, min(start + step, kv_length))


def _dropped_term(q: torch.Tensor, prepared: Prepared, scale: float) -> torch.Tensor | float:
    """scale * q . k_mean, the row constant that smooth K leaves out of the scores: (B, Hq, rows)."""
    if prepared.k_mean is None:
        return 0.0
    return scale * grouped_product(q.float(), prepared.k_mean).squeeze(3)
