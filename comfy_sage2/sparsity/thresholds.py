"""How many key blocks each head leaves out, by the error that is measured on a sample of its rows.

Each query block ranks its key blocks by their scores, and a head leaves out the lowest ranks, equally many in each
query block. A measurement decides how many: it computes the output of 64 rows exactly, block by block, and sums it over
the blocks that each of twelve shares would keep. It takes the smallest share whose error, like those of all larger
shares, is within the bound. Nothing waits for the device. One share for all heads would not do: a head that attends to
everything a little needs most of its blocks.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from ..block_mask import BLOCK_TOKENS
from ..metrics import spread
from ..reference.block_scores import blocks_of_share
from .always_computed import TokenRange, blocks_with, raise_always_computed_

SAMPLED_ROWS = 64
COMPUTED_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.03)
"""Of the key blocks that a head may compute.

They lie far apart, so that most heads stay well within the bound. At the same number of blocks, whole videos of the
demo model are 2 dB closer to the dense ones than with shares so fine that every head is at its bound.
"""
_SCORE_BYTES = 64 << 20  # of the scores of the sampled rows that are in memory at once
_SCALE_OF_P = 4096.0  # so that small probabilities of long calls do not vanish in fp16; outputs are normalized


def sampled_rows(q_length: int, sample: int, device: torch.device, dense: torch.Tensor | None = None) -> torch.Tensor:
    """Query tokens to measure, (SAMPLED_ROWS,) int64 or all where there are fewer; each `sample` has others.

    dense: bool on the CPU, one for each block of queries: those whose queries attend to all keys and are not sampled.
    """
    if dense is None:
        return spread(q_length, SAMPLED_ROWS, device, sample=sample)
    tokens = (~dense).repeat_interleave(BLOCK_TOKENS)[:q_length].nonzero()[:, 0]
    return tokens[spread(len(tokens), SAMPLED_ROWS, tokens.device, sample=sample)].to(device)


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


class Choice(NamedTuple):
    """What `choose` gives, (B, Hq) float32 each.

    Attributes:
        thresholds: a block is active where its rank is above.
        errors: of each head on the sampled rows.
        compared_errors: those of the blocks to compare; None without them.
    """

    thresholds: torch.Tensor
    errors: torch.Tensor
    compared_errors: torch.Tensor | None


def choose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: torch.Tensor,
    bound: float,
    *,
    scale: float,
    sample: int = 0,
    always: tuple[TokenRange, ...] = (),
    bias: torch.Tensor | None = None,
    compared: torch.Tensor | None = None,
) -> Choice:
    """The fewest blocks of each head whose error is within `bound`; `scores` become the ranks that thresholds are of.

    The other arguments are those of `errors`.

    Args:
        scores: (B, Hq, Tq, Tk), as `block_scores` gives them.
        bound: relative L2 error of a head.
        sample: the number of the sample of rows; other numbers give other rows.
        always: tokens whose blocks are computed whatever their scores, in blocks of 128: as keys of all queries, and as
            queries with all keys.
    """
    keys, queries = blocks_with(always, k.shape[2]), blocks_with(always, q.shape[2])
    rows = sampled_rows(q.shape[2], sample, q.device, queries if always else None)
    raise_always_computed_(rank_(scores), keys, queries)
    thresholds = candidates(scores)
    measured = errors(q, k, v, scores, rows, scale=scale, thresholds=thresholds, bias=bias, compared=compared)
    place = loosest(measured[..., : thresholds.shape[2]], bound)[..., None]
    return Choice(
        thresholds.gather(2, place)[..., 0],
        measured.gather(2, place)[..., 0],
        None if compared is None else measured[..., -1],
    )


def blocks_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    active: torch.Tensor,
    *,
    scale: float,
    sample: int = 0,
    always: tuple[TokenRange, ...] = (),
) -> torch.Tensor:
    """The relative L2 error of each head that computes its `active` blocks, bool (B, Hq, Tq, Tk): (B, Hq) float32.

    The other arguments are those of `choose`.
    """
    rows = sampled_rows(q.shape[2], sample, q.device, blocks_with(always, q.shape[2]) if always else None)
    thresholds = torch.full((*active.shape[:2], 1), 0.5, device=q.device)
    return errors(q, k, v, active.float(), rows, scale=scale, thresholds=thresholds)[..., 0]


def candidates(ranks: torch.Tensor) -> torch.Tensor:
    """The thresholds that a head's is chosen from, strictest first: (B, Hq, L) float32; the first leaves out nothing.

    ranks: (B, Hq, Tq, Tk).
    """
    blocks = ranks.shape[3]
    counts = (blocks_of_share(share, blocks) for share in COMPUTED_SHARES)
    # Made on the device: nobody waits for a copy.
    thresholds = torch.stack([torch.full((), blocks - count + 0.5, device=ranks.device) for count in counts])
    return thresholds.expand(*ranks.shape[:2], -1)


def errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranks: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    thresholds: torch.Tensor,
    bias: torch.Tensor | None = None,
    compared: torch.Tensor | None = None,
) -> torch.Tensor:
    """The relative L2 error of each head at each of its thresholds, against exact attention.

    Args:
        q: (B, Hq, Nq, D); k, v: (B, Hkv, Nkv, D), any float dtype. Not causal.
        ranks: (B, Hq, Tq, Tk): a block is left out where its rank is at most the threshold.
        rows: the query tokens to compare, (R,) int64.
        scale: softmax scale.
        thresholds: (B, Hq, L), ascending.
        bias: float32 (B | 1, Hq | 1, 1, Nkv), added to the scaled scores of all queries; None without a mask.
        compared: bool (B | 1, Hq, Tq, Tk), active blocks whose error is measured too.

    Returns:
        (B, Hq, L) float32, or (B, Hq, L + 1) with the error of `compared` behind.
    """
    group, of_rows = q.shape[1] // k.shape[1], rows // BLOCK_TOKENS
    active = ranks[:, :, of_rows][:, :, :, None] > thresholds[:, :, None, :, None]
    if compared is not None:
        of_compared = compared[:, :, of_rows].expand(*q.shape[:2], -1, -1)
        active = torch.cat((active, of_compared[:, :, :, None]), dim=3)
    biases = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
    heads = max(_SCORE_BYTES // max(4 * rows.shape[0] * k.shape[2], 1) // group, 1)  # of k, for all of q's
    of_heads = []
    # Under autocast the products would be rounded to 16 bits.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for b, first in itertools.product(range(q.shape[0]), range(0, k.shape[1], heads)):
            kv, part = slice(first, first + heads), slice(first * group, (first + heads) * group)
            of_part = None if biases is None else biases[b, part]
            p = _probabilities(q[b, part, rows], k[b, kv], scale, of_part, behind=-k.shape[2] % BLOCK_TOKENS)
            of_heads.append(_errors(p, v[b, kv], active[b, part]))
    return torch.cat(of_heads).view(*q.shape[:2], active.shape[3])


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Matrices a @ b into float32 `out`; 16-bit numbers of a GPU are multiplied as they are and summed in float32."""
    if a.dtype == b.dtype and _multiplies_16_bits(a.dtype, a.device):
        torch.ops.aten.bmm.dtype_out(a, b, torch.float32, out=out)
    else:
        torch.bmm(a.float(), b.float(), out=out)


def _multiplies_16_bits(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype not in (torch.float16, torch.bfloat16) or device.type != "cuda" or torch.version.cuda is None:
        return False
    if not hasattr(torch.ops.aten.bmm, "dtype_out"):
        return False
    # torch refuses fp16 into float32 while sums in fp16 are allowed, as by ComfyUI's --fast fp16_accumulation.
    if dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, scale: float, bias: torch.Tensor | None, *, behind: int
) -> torch.Tensor:
    """The attention of some rows, _SCALE_OF_P times: (Hq, R, Nkv + behind) in k's dtype, zeros behind the last key.

    q: (Hq, R, D), k: (Hkv, Nkv, D), bias: (Hq, 1, Nkv).
    """
    length = k.shape[1]
    scores = torch.empty((*q.shape[:2], length), device=q.device)
    _multiply(q.reshape(len(k), -1, q.shape[2]), k.transpose(1, 2), scores.view(len(k), -1, length))
    scores.mul_(scale)
    p = k.new_empty((*q.shape[:2], length + behind))
    p[:, :, length:] = 0
    torch.mul((scores if bias is None else scores.add_(bias)).softmax(dim=2), _SCALE_OF_P, out=p[:, :, :length])
    return p


def _errors(p: torch.Tensor, v: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """The errors of some heads: (Hq, L).

    P V is computed once, block by block: an output is a sum over the blocks that are active.

    p: (Hq, R, tokens of Tk blocks), v: (Hkv, Nkv, D), active: bool (Hq, R, L, Tk).
    """
    (heads, rows), blocks, (kv_heads, length, _) = p.shape[:2], active.shape[3], v.shape
    of_blocks = p.unflatten(2, (blocks, BLOCK_TOKENS))
    full, rest = divmod(length, BLOCK_TOKENS)
    outs = torch.empty((blocks, heads, rows, v.shape[2]), device=p.device)
    for head in range(heads if full else 0):
        of_kv = v[head * kv_heads // heads, : full * BLOCK_TOKENS].unflatten(0, (full, BLOCK_TOKENS))
        _multiply(of_blocks[head, :, :full].transpose(0, 1), of_kv, outs[:full, head])
    if rest:
        last = of_blocks[:, :, full, :rest].reshape(kv_heads, -1, rest)
        _multiply(last, v[:, length - rest :], outs[full].view(kv_heads, -1, v.shape[2]))
    masses = of_blocks.sum(dim=3, dtype=torch.float32)  # (Hq, R, Tk)
    # All blocks, too: they give the exact output.
    weights = torch.nn.functional.pad(active.float(), (0, 0, 0, 1), value=1.0)
    kept = weights @ masses[..., None]  # (Hq, R, L + 1, 1)
    # A row of which nothing is left gives zeros, as the kernels do: all of it is lost.
    sums = weights.flatten(0, 1) @ outs.flatten(1, 2).transpose(0, 1)
    out = sums.view(heads, rows, -1, v.shape[2]) / kept.clamp_min(torch.finfo(torch.float32).tiny)
    exact = out[:, :, -1:]
    lost, whole = (torch.linalg.vector_norm(tensor, dim=(1, 3)) for tensor in (out[:, :, :-1] - exact, exact))
    relative: torch.Tensor = lost / whole
    return relative


def loosest(measured: torch.Tensor, bound: float) -> torch.Tensor:
    """The place of the loosest threshold whose error and those of all stricter ones are within `bound`: (B, Hq) int64.

    measured: (B, Hq, L), strictest first. The first threshold leaves out nothing and stands where no looser one is
    within the bound; NaN is not within any.
    """
    return (measured[..., 1:] <= bound).long().cumprod(dim=2).sum(dim=2)
