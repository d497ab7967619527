"""A sample of an attention call: some heads and query rows, and what exact attention gives there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def spread(count: int, most: int, device: torch.device, *, sample: int = 0) -> torch.Tensor:
    """At most `most` indices, evenly spread over range(count), int64; each `sample` has others.

    The samples are shifted by multiples of the golden ratio, so that no two have the same indices soon.
    """
    shift = sample * (math.sqrt(5.0) - 1.0) / 2.0 % 1.0
    taken = min(count, most)
    return ((torch.arange(taken, device=device, dtype=torch.float64) + shift) * (count / max(taken, 1))).long()


def exact_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Sequence[int],
    rows: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q k^T * scale + mask) v in float32 at some heads and rows of q, (B, heads, rows, D).

    Args:
        q: (B, Hq, Nq, D); k, v: (B, Hkv, Nkv, D).
        rows: int64 indices on the device.
        scale: softmax scale; None means 1/sqrt(D).
        mask: None or 4-D, bool (True = attend) or additive float.
    """
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask.index_select(2, rows)
        mask = mask if mask.dtype == torch.bool else mask.float()
    group = q.shape[1] // k.shape[1]
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        # Head by head: the scores of all heads of a long video together would not fit beside the model.
        return torch.cat(
            [
                torch.nn.functional.scaled_dot_product_attention(
                    q[:, head, None].index_select(2, rows).float(),
                    k[:, head // group, None].float(),
                    v[:, head // group, None].float(),
                    attn_mask=None if mask is None else mask if mask.shape[1] == 1 else mask[:, head, None],
                    scale=scale,
                )
                for head in heads
            ],
            dim=1,
        )
