"""Algorithm 1 of the SageAttention2 paper: blocks of queries, online softmax over blocks of keys."""

from __future__ import annotations

import math

import torch

from .active_blocks import mask_skipped_blocks_, overlapping
from .hidden_keys import hidden_keys
from .options import ReferenceOptions
from .preparation import prepare
from .scores import grouped_product, mask_scores_, tile_scores
from .softmax import OnlineSoftmax
from .steps import key_steps, row_tiles


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ReferenceOptions | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    active_blocks: torch.Tensor | None = None,
    rotated_heads: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized attention with the numerics of `options`, in memory O(N D) plus one block.

    Args:
        q: (B, Hq, Nq, D); k: (B, Hkv, Nkv, D); v: (B, Hkv, Nkv, Dv); any float dtype.
        options: None is SageAttn2-8b with the paper's groups.
        attn_mask: None or 4-D, broadcasting to (B, Hq, Nq, Nkv): bool (True = attend) or additive. Keys that it hides
            from all queries and heads have no effect, whatever their K and V hold (`hidden_keys`).
        active_blocks: None, or bool (B | 1, Hq | 1, Tq, Tk): which blocks of 128 keys each block of 128 queries attends
            to. A CPU skips the computation of blocks that no head and no query of a row block needs.
        rotated_heads: None, or bool (B, Hkv): which heads to rotate with rotate=None, instead of those that gain.

    Returns:
        out (B, Hq, Nq, Dv) float32 and lse (B, Hq, Nq) float32, the natural log-sum-exp of the scaled scores.
    """
    options = ReferenceOptions() if options is None else options
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    # Products of integers in float32 are exact; under autocast they would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        prepared = prepare(q, k, v, options, hidden_keys(attn_mask), rotated_heads)
        outs, lses = [], []
        for rows in row_tiles(q, options):
            softmax = OnlineSoftmax(q.shape[0], q.shape[1], rows.stop - rows.start, prepared.v, options)
            for keys in key_steps(rows, q.shape[2], k.shape[2], options, is_causal=is_causal):
                active = None if active_blocks is None else overlapping(active_blocks, rows, keys)
                if active is not None and active.is_cpu and not active.any():
                    continue
                scores = tile_scores(prepared, rows, keys, scale, options.groups.block_q)
                mask_scores_(scores, attn_mask, is_causal, rows, keys)
                if active is not None:
                    mask_skipped_blocks_(scores, active, rows, keys)
                softmax.add(scores, keys)
            outs.append(softmax.output(prepared.v_mean))
            lse = softmax.log_sum_exp()
            if prepared.k_mean is not None:  # the row constant that smooth K leaves out of the scores
                lse = lse + scale * grouped_product(q[:, :, rows].float(), prepared.k_mean).squeeze(3)
            if attn_mask is not None and attn_mask.dtype != torch.bool:
                # These rows' mask was clamped to what float32 holds in units of log2.
                lse = lse.masked_fill(softmax.is_lowest(), torch.finfo(attn_mask.dtype).min)
            lses.append(lse)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
