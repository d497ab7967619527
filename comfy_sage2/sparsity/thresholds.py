"""The threshold of each head, by the error that is measured on a sample of its rows.

One threshold for all heads would not do: a head that attends to everything a little has all of its probability in
blocks of small P.
"""

from __future__ import annotations

import math

import torch

from ..block_mask import BLOCK_TOKENS
from ..reference.block_scores import blocks_of_share
from .levels import Level

SAMPLED_ROWS = 64
COMPUTED_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.03)
"""Of the key blocks that a head may compute.

They lie apart, so that most heads stay well within the bound. At the same number of blocks whole videos of the demo
model are 2 dB nearer to the dense ones than with shares so fine that every head is at its bound.
"""
_SCORE_BYTES = 64 << 20  # of the scores of the sampled rows that are in memory at once


def sampled_rows(
    q_length: int,
    number: int,
    device: torch.device,
    dense: torch.Tensor | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> torch.Tensor:
    """Evenly spread query tokens, (SAMPLED_ROWS,) int64 or all where there are fewer; others for each `number`.

    dense: bool on the CPU, one for each block of queries: those whose queries are not sampled, as they attend to all
        keys; None is none of them.
    """
    turn = number * (math.sqrt(5.0) - 1.0) / 2.0 % 1.0  # no two numbers give the same rows soon
    if dense is None:
        return _spread(q_length, turn, device)
    tokens = (~dense).repeat_interleave(block_tokens)[:q_length].nonzero()[:, 0]
    return tokens[_spread(len(tokens), turn, tokens.device)].to(device)


def _spread(length: int, turn: float, device: torch.device) -> torch.Tensor:
    count = min(SAMPLED_ROWS, length)
    return ((torch.arange(count, device=device, dtype=torch.float64) + turn) * (length / max(count, 1))).long()


def rank_(scores: torch.Tensor) -> torch.Tensor:
    """Write the rank of each score among the key blocks of its query block, from 1 for the lowest: (B, Hq, Tq, Tk).

    A threshold between ranks leaves out as many blocks of each query block. By scores themselves a head would leave
    out most where its queries attend to everything a little: there each block holds little, and yet all are needed.
    NaN becomes +inf, which no threshold leaves out.
    """
    ranks = torch.arange(1.0, scores.shape[3] + 1.0, device=scores.device)
    heads = scores.flatten(0, 1)
    step = max(_SCORE_BYTES // max(heads[0].numel() * scores.itemsize, 1), 1)
    for part in heads.split(step):
        unknown = part.isnan()
        order = part.sort(dim=2, stable=True).indices
        part.scatter_(2, order, ranks.expand_as(part)).masked_fill_(unknown, math.inf)
    return scores


def candidates(scores: torch.Tensor, level: Level) -> torch.Tensor:
    """The thresholds that a head's is chosen from, strictest first: (B, Hq, L) float32 on the device.

    Those of the level's ladder for block margins; else thresholds of ranks, the first of which leaves out nothing.

    scores: (B, Hq, Tq, Tk), block margins or ranks.
    """
    if level.ladder is not None:
        thresholds = _on(scores.device, level.ladder)
    else:
        blocks = scores.shape[3]
        computed = (blocks_of_share(share, blocks) for share in COMPUTED_SHARES)
        thresholds = _on(scores.device, tuple(blocks - count + 0.5 for count in computed))
    return thresholds.expand(*scores.shape[:2], -1)


def errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    thresholds: torch.Tensor,
    norm: int = 2,
    block_tokens: int = BLOCK_TOKENS,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What leaving out the skipped blocks costs each head at each of its thresholds, against exact attention.

    Args:
        q: (B, Hq, Nq, D); k, v: (B, Hkv, Nkv, D), any float dtype. Not causal.
        scores: (B, Hq, Tq, Tk): a block is skipped where its score is at most the threshold.
        rows: the query tokens to compare, (R,) int64.
        scale: softmax scale.
        thresholds: (B, Hq, L), ascending.
        norm: 1 for relative L1, 2 for relative L2.
        block_tokens: queries or keys of a block.
        bias: float32 (B | 1, Hq | 1, 1, Nkv), added to the scaled scores of all queries; None without a mask.

    Returns:
        Relative error of each head over its rows, (B, Hq, L) float32 on the device; nobody waits for it.
    """
    group = q.shape[1] // k.shape[1]
    bytes_of_head = 4 * rows.shape[0] * (k.shape[2] + scores.shape[3] * k.shape[3])
    heads = max(_SCORE_BYTES // max(bytes_of_head, 1) // group, 1) * group  # of q, with all of k's that they share
    # Under autocast the products would be rounded to 16 bits.
    biases = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
    with torch.autocast(q.device.type, enabled=False):
        found = [
            _errors(
                q[b, part],
                k[b, kv],
                v[b, kv],
                scores[b, part],
                rows,
                scale,
                thresholds[b, part],
                norm,
                block_tokens,
                None if biases is None else biases[b, part],
            )
            for b in range(q.shape[0])
            for part, kv in _parts(q.shape[1], heads, group)
        ]
    return torch.cat(found).view(*q.shape[:2], thresholds.shape[2])


def _parts(q_heads: int, step: int, group: int) -> list[tuple[slice, slice]]:
    starts = range(0, q_heads, step)
    return [(slice(start, start + step), slice(start // group, -(-(start + step) // group))) for start in starts]


def _errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    thresholds: torch.Tensor,
    norm: int,
    block_tokens: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The errors of some heads of one batch entry: (heads, L).

    P V is computed once, block by block: a threshold's output is a sum over the blocks that it leaves.
    """
    group, behind = q.shape[0] // k.shape[0], -k.shape[1] % block_tokens
    k, v = (tensor.float().repeat_interleave(group, dim=0) for tensor in (k, v))
    of_keys = (q[:, rows].float() @ k.transpose(1, 2)).mul_(scale)
    p = (of_keys if bias is None else of_keys.add_(bias)).softmax(dim=2)
    p, v = (torch.nn.functional.pad(tensor, pad) for tensor, pad in ((p, (0, behind)), (v, (0, 0, 0, behind))))
    p = p.unflatten(2, (-1, block_tokens)).permute(2, 0, 1, 3)  # (Tk, heads, R, block_tokens)
    outs = p @ v.unflatten(1, (-1, block_tokens)).transpose(0, 1)  # (Tk, heads, R, D)
    masses = p.sum(dim=3).permute(1, 2, 0)  # (heads, R, Tk)
    of_rows = scores[:, rows // block_tokens]
    # NaN is left out here, so that its head is not within any bound.
    active = (of_rows[:, :, None] > thresholds[:, None, :, None]).float()  # (heads, R, L, Tk)
    kept = (active @ masses[..., None])[..., 0]  # (heads, R, L)
    # A row of which nothing is left gives zeros, as the kernels do: all of it is lost.
    out = active @ outs.permute(1, 2, 0, 3) / kept.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    exact = outs.sum(dim=0)[:, :, None]
    lost, whole = (torch.linalg.vector_norm(tensor, norm, dim=(1, 3)) for tensor in (out - exact, exact))
    found: torch.Tensor = lost / whole
    return found


def loosest(found: torch.Tensor, bound: float) -> torch.Tensor:
    """The place of the loosest threshold whose error and those of all stricter ones are within `bound`.

    found: (B, Hq, L), strictest first. Returns (B, Hq) int64. The first threshold needs no measurement: it stands where
    nothing looser is within the bound, and NaN is not within any.
    """
    return (found[..., 1:] <= bound).long().cumprod(dim=2).sum(dim=2)


def chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    level: Level,
    *,
    scale: float,
    block_tokens: int = BLOCK_TOKENS,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loosest threshold of each head that is within the level's bound, and its error: both (B, Hq) float32.

    The arguments are those of `candidates` and `errors`; nobody waits for the device.
    """
    thresholds = candidates(scores, level)
    measured = errors(
        q, k, v, scores, rows, scale=scale, thresholds=thresholds, norm=level.norm, block_tokens=block_tokens, bias=bias
    )
    place = loosest(measured, level.bound)[..., None]
    return thresholds.gather(2, place)[..., 0], measured.gather(2, place)[..., 0]


def _on(device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """(len(values),) float32, made on the device: nobody waits for a copy."""
    return torch.stack([torch.full((), value, device=device) for value in values])
