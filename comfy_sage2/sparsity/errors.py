"""What heads lose by the key blocks that they leave out, measured on some of their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends.block_kernels import block_outputs
from ..block_mask import BLOCK_TOKENS
from ..reference.block_scores import POOL_TOKENS
from ..reference.pooled_tail import block_means, center_of, tokens_of_blocks
from .always_computed import TokenRange
from .sampled_rows import SampledRows

_WEIGHT_OF_UNLIKE = 0.25  # beside 1 of a row that is spread
_POPULAR, _LEAST_POPULAR_ROWS = 3.0, 4.0  # times an even share of the rows' probability, and as many rows


class Inputs(NamedTuple):
    """A self-attention call, heads first, not causal.

    Attributes:
        q: (B, Hq, N, D); k, v: (B, Hkv, N, D), any float dtype.
        scale: softmax scale.
        bias: float32 (B | 1, Hq | 1, 1, N), added to the scaled scores of all queries; None without a mask.
        always: tokens whose blocks are computed whatever they hold: as keys of all queries, and as queries with all
            keys.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None
    always: tuple[TokenRange, ...] = ()


class RowOutputs(NamedTuple):
    """What sampled rows of one entry of a batch get from each key block alone.

    An output is a sum over the active blocks, so this is all that errors are made of. Rows come before heads, as in the
    outputs of fused attentions: nothing large is copied.

    Attributes:
        inputs: of the entry: tensors come without the axis of the batch.
        tokens: (R, Hq) int64.
        unlike: how many of the rows, the last ones, are not spread.
        queries: (R, Hq, D).
        outs: (R, Hq, part of T, D) each.
        lse: (R, Hq, T) float32.
        masses: how much of each row's probability the blocks have, (R, Hq, T) float32.
    """

    inputs: Inputs
    tokens: torch.Tensor
    unlike: int
    queries: torch.Tensor
    outs: tuple[torch.Tensor, ...]
    lse: torch.Tensor
    masses: torch.Tensor


def row_outputs(inputs: Inputs, rows: SampledRows) -> list[RowOutputs]:
    """Attend with the sampled rows, in each entry of the batch."""
    outputs = []
    for entry in range(inputs.q.shape[0]):
        q, k, v = (tensor[entry] for tensor in inputs[:3])
        bias = None if inputs.bias is None else inputs.bias.expand(len(inputs.q), -1, -1, -1)[entry]
        tokens = rows.tokens[entry].T
        queries = _of_rows(q, tokens)
        outs, lse = block_outputs(queries, k, v, inputs.scale, bias)
        of_entry = Inputs(q, k, v, inputs.scale, bias)
        outputs.append(RowOutputs(of_entry, tokens, rows.unlike, queries, outs, lse, lse.softmax(dim=2)))
    return outputs


def popular(outputs: list[RowOutputs]) -> torch.Tensor:
    """The key blocks that many rows of a head attend to: bool (B, Hq, T).

    Their means may not tell, as where many queries look for one key: then each query block leaves them out or not by
    chance, and a sample of rows does not see where.
    """
    masses = _stacked([output.masses.sum(dim=0) for output in outputs], dim=0)
    rows, _, blocks = outputs[0].lse.shape
    return masses >= popular_mass(rows, blocks)


def popular_mass(rows: int, blocks: int) -> float:
    """Of how many of the rows a block has the probability that is `popular`."""
    return max(_LEAST_POPULAR_ROWS, _POPULAR * rows / blocks)


def errors(
    outputs: list[RowOutputs],
    ranks: torch.Tensor,
    cuts: torch.Tensor,
    compared: torch.Tensor | None = None,
    *,
    with_tail: bool = False,
) -> torch.Tensor:
    """The relative L2 error of each head for each cut, against exact attention.

    It is that of the rows that are spread, or that of all where it is larger: unlike rows never lower it.

    Args:
        ranks: (B, Hq, T, T): a block is left out where its rank is at most the cut.
        cuts: (L + 1,) float32; the last one leaves out everything.
        compared: bool (B, Hq, T, T), active blocks whose error is measured too.
        with_tail: measure also what each head loses where the other blocks take part by the means of their tokens
            (`reference.pooled_tail`).

    Returns:
        Float32 (1, B, Hq, L), or (2, B, Hq, L) with the errors with the tail; with `compared` L + 1, its error first.
    """
    of_entries = []
    for entry, output in enumerate(outputs):
        of_compared = None if compared is None else compared[entry]
        of_entries.append(_relative(_differences(output, ranks[entry], cuts, of_compared, with_tail), output.unlike))
    return _stacked(of_entries, dim=1)


def _differences(
    rows: RowOutputs, ranks: torch.Tensor, cuts: torch.Tensor, compared: torch.Tensor | None, with_tail: bool
) -> torch.Tensor:
    """Norms of the differences to the exact outputs, and behind them those of the outputs: (1 | 2, R, Hq, L + 1)."""
    query_blocks, masses = rows.tokens // BLOCK_TOKENS, rows.masses[:, :, None]
    active = _of_rows(ranks, query_blocks)[:, :, None] > cuts[:, None]  # (R, Hq, L, T)
    if compared is not None:
        active = torch.cat((_of_rows(compared, query_blocks)[:, :, None], active), dim=2)
    kept = active * masses
    total = kept.sum(dim=3, keepdim=True)
    lost = [_lost(kept, total, rows)]
    if with_tail:
        of_all = rows.lse[..., :1] - rows.lse.log_softmax(dim=2)[..., :1]
        tail = (_tail_scores(rows) - of_all).exp_()[:, :, None].masked_fill(active, 0.0)
        total = total + tail.sum(dim=3, keepdim=True)
        means = block_means(rows.inputs.v).to(lost[0].dtype)
        by_tail = torch.div(tail, total).to(means.dtype).unflatten(1, (len(means), -1))
        added = torch.einsum("rhglt,htd->rhgld", by_tail, means).flatten(1, 2)
        lost.append(_lost(kept, total, rows).sub_(added))
    norms: torch.Tensor = torch.linalg.vector_norm(_stacked(lost, dim=0), dim=4, dtype=torch.float32)
    return norms


def _stacked(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """As torch.stack; one tensor is not copied."""
    return torch.stack(tensors, dim) if len(tensors) > 1 else tensors[0].unsqueeze(dim)


def _of_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows (R, H), each head's own, of x (H, N, D): (R, H, D)."""
    return x.transpose(0, 1).gather(0, rows[..., None].expand(-1, -1, x.shape[2]))


def _lost(kept: torch.Tensor, total: torch.Tensor, rows: RowOutputs) -> torch.Tensor:
    """The exact outputs without those by `kept` masses of their `total`, (R, Hq, L, D).

    The outputs of blocks are added up by what they count in the difference, so that little cancels in 16 bits. A row of
    which nothing is left gives zeros, as the kernels do.
    """
    weights = torch.empty(kept.shape, dtype=rows.outs[0].dtype, device=kept.device)
    least = torch.finfo(torch.float32).tiny
    torch.addcdiv(rows.masses[:, :, None], kept, total.clamp_min(least), value=-1.0, out=weights)
    parts = weights.split([out.shape[2] for out in rows.outs], dim=3)
    lost: torch.Tensor
    lost, *rest = (part @ out for part, out in zip(parts, rows.outs, strict=True))
    for of_last in rest:
        lost.add_(of_last)
    return lost


def _tail_scores(rows: RowOutputs) -> torch.Tensor:
    """The LSE of each block in the tail, (R, Hq, T) float32."""
    inputs, tokens = rows.inputs, rows.tokens
    kv_heads, length, _ = inputs.k.shape
    center = center_of(inputs.k).float()
    means = block_means(inputs.k) - center
    first = tokens - tokens % POOL_TOKENS
    of_pools = (first + torch.arange(POOL_TOKENS, device=tokens.device)[:, None, None]).clamp_max(length - 1)
    pooled = _of_rows(inputs.q, of_pools.flatten(0, 1)).unflatten(0, (POOL_TOKENS, -1)).mean(dim=0, dtype=torch.float32)
    by_means, by_center = (
        torch.einsum("rhgd,htd->rhgt", x.unflatten(1, (kv_heads, -1)), y).flatten(1, 2)
        for x, y in ((pooled, means), (rows.queries.float(), center))
    )
    return torch.add(tokens_of_blocks(inputs.k).log(), by_means + by_center, alpha=inputs.scale)


def _relative(norms: torch.Tensor, unlike: int) -> torch.Tensor:
    """The errors (K, Hq, L - 1) of norms (K, R, Hq, L), the last `unlike` of whose rows are not spread."""
    spread, others = norms.square().tensor_split((norms.shape[1] - unlike,), dim=1)
    sums = spread.sum(dim=1)
    ratios = sums[..., :-1] / sums[:1, ..., -1:]
    if unlike:
        sums = torch.add(sums, others.sum(dim=1), alpha=_WEIGHT_OF_UNLIKE)
        ratios = ratios.maximum(sums[..., :-1] / sums[:1, ..., -1:])
    return ratios.sqrt_()
