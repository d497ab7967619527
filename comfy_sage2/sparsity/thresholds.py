"""The threshold of each head, by the error that is measured on a sample of its rows.

One threshold for all heads would not do: a head that attends to everything a little has all of its probability in
blocks of small P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..block_mask import BLOCK_TOKENS
from .levels import LADDER

SAMPLED_ROWS = 64
_SCORE_BYTES = 64 << 20  # of the scores of the sampled rows that are in memory at once


def sampled_rows(q_length: int, number: int, device: torch.device) -> torch.Tensor:
    """Evenly spread query tokens, (SAMPLED_ROWS,) int64 or all where there are fewer; others for each `number`."""
    count = min(SAMPLED_ROWS, q_length)
    turn = number * (math.sqrt(5.0) - 1.0) / 2.0 % 1.0  # no two numbers give the same rows soon
    return ((torch.arange(count, device=device, dtype=torch.float64) + turn) * (q_length / count)).long()


def errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_margins: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    thresholds: Sequence[float] = LADDER,
) -> torch.Tensor:
    """What leaving out the skipped blocks costs each head at each of the `thresholds`, against exact attention.

    Args:
        q: (B, Hq, Nq, D); k, v: (B, Hkv, Nkv, D), any float dtype. Not causal, without a mask.
        block_margins: (B, Hq, Tq, Tk) as `reference.block_margins.block_margins` gives them.
        rows: the query tokens to compare, (R,) int64.
        scale: softmax scale.
        thresholds: in log2, as the margins are.

    Returns:
        Relative L1 of each head over its rows, (B, Hq, len(thresholds)) float32 on the device; nobody waits for it.
    """
    group = q.shape[1] // k.shape[1]
    bytes_of_head = 4 * rows.shape[0] * k.shape[2]
    heads = max(_SCORE_BYTES // bytes_of_head // group, 1) * group  # of q, with all of k's heads that they share
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        found = [
            _errors(q[b, part], k[b, kv], v[b, kv], block_margins[b, part], rows, scale, thresholds)
            for b in range(q.shape[0])
            for part, kv in _parts(q.shape[1], heads, group)
        ]
    return torch.cat(found).view(*q.shape[:2], len(thresholds))


def _parts(q_heads: int, step: int, group: int) -> list[tuple[slice, slice]]:
    starts = range(0, q_heads, step)
    return [(slice(start, start + step), slice(start // group, -(-(start + step) // group))) for start in starts]


def _errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_margins: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    thresholds: Sequence[float],
) -> torch.Tensor:
    """The errors of some heads of one batch entry: (heads, len(thresholds))."""
    group = q.shape[0] // k.shape[0]
    k, v = (tensor.float().repeat_interleave(group, dim=0) for tensor in (k, v))
    p = (q[:, rows].float() @ k.transpose(1, 2)).mul_(scale).softmax(dim=2)
    exact = p @ v
    of_rows = block_margins[:, rows // BLOCK_TOKENS]
    found = []
    for threshold in thresholds:
        active = (of_rows > threshold).repeat_interleave(BLOCK_TOKENS, dim=2)[..., : k.shape[1]]
        kept = p * active
        # A row of which nothing is left gives zeros, as the kernels do: all of it is lost.
        out = (kept @ v) / kept.sum(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        found.append((out - exact).abs().sum(dim=(1, 2)) / exact.abs().sum(dim=(1, 2)))
    return torch.stack(found, dim=1)


def loosest(found: torch.Tensor, bound: float, thresholds: Sequence[float] = LADDER) -> torch.Tensor:
    """The loosest of `thresholds`, strictest first, whose error and those of all stricter ones are within `bound`.

    found: (B, Hq, len(thresholds)). Returns (B, Hq) float32. The first threshold needs no measurement: it stands where
    nothing looser is within the bound, and NaN is not within any.
    """
    within = (found[..., 1:] <= bound).long().cumprod(dim=2).sum(dim=2)
    return _on(found.device, thresholds)[within]


def at(found: torch.Tensor, chosen: torch.Tensor, thresholds: Sequence[float] = LADDER) -> torch.Tensor:
    """Of what `errors` found, (B, Hq, len(thresholds)), that at the thresholds `chosen`, (B, Hq)."""
    places = _on(found.device, thresholds) == chosen[..., None]
    return found.where(places, 0.0).sum(dim=2)


def _on(device: torch.device, thresholds: Sequence[float]) -> torch.Tensor:
    """(len(thresholds),) float32, made on the device: nobody waits for a copy."""
    return torch.stack([torch.full((), threshold, device=device) for threshold in thresholds])
