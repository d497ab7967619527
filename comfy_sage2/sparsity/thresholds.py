"""The threshold of each head, by the error that is measured on a sample of its rows.

One threshold for all heads would not do: a head that attends to everything a little has all of its probability in
blocks of small P. Nor would one list of thresholds: where a head's scores lie decides which thresholds leave out what.
"""

from __future__ import annotations

import math

import torch

from ..block_mask import BLOCK_TOKENS
from ..reference.block_margins import LOSSLESS
from .levels import Level

SAMPLED_ROWS = 64
QUANTILES = 64  # thresholds lie at 1/64, 2/64 and so on of a head's scores
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


def candidates(
    scores: torch.Tensor, rows: torch.Tensor, level: Level, *, block_tokens: int = BLOCK_TOKENS
) -> torch.Tensor:
    """The thresholds that a head's is chosen from, strictest first: (B, Hq, L) float32 on the device.

    Those of the level's ladder; else quantiles of each head's own finite scores, none below LOSSLESS, and LOSSLESS
    before them: a block of that share of its queries' probability is as good as none by either kind of score.

    scores: (B, Hq, Tq, Tk), such as block margins; +inf where a block is always computed. rows: see `errors`.
    """
    batch, heads = scores.shape[:2]
    if level.ladder is not None:
        return _on(scores.device, level.ladder).expand(batch, heads, -1)
    of_rows = scores[:, :, rows // block_tokens].flatten(2).nan_to_num(nan=math.inf, posinf=math.inf)
    ordered = of_rows.sort(dim=2).values
    finite = (ordered < math.inf).sum(dim=2, keepdim=True)
    places = torch.arange(1, QUANTILES, device=scores.device) * finite // QUANTILES
    quantiles = ordered.gather(2, places).clamp(LOSSLESS, torch.finfo(torch.float32).max)
    return torch.cat([quantiles.new_full((batch, heads, 1), LOSSLESS), quantiles], dim=2)


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


def _on(device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    """(len(values),) float32, made on the device: nobody waits for a copy."""
    return torch.stack([torch.full((), value, device=device) for value in values])
