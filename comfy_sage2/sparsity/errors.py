"""The errors of heads that leave out key blocks, measured on some of their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends.block_kernels import block_outputs
from ..block_mask import BLOCK_TOKENS
from ..reference.block_scores import POOL_TOKENS
from ..reference.pooled_tail import block_means, center_of, tokens_of_blocks
from .always_computed import TokenRange
from .sampled_rows import SampledRows

_WEIGHT_OF_UNLIKE = 0.25  # of an unlike row; a spread row has the weight 1
# A block is popular if it has this many times an even share of the rows' probability, and that of this many rows.
_POPULAR, _LEAST_POPULAR_ROWS = 3.0, 4.0


class Inputs(NamedTuple):
    """A self-attention call, heads first, not causal.

    Attributes:
        q: (B, Hq, N, D); k, v: (B, Hkv, N, D), any float dtype.
        scale: softmax scale.
        bias: float32 (B | 1, Hq | 1, 1, N), added to the scaled scores of all queries; None without a mask.
        always: tokens whose blocks are always computed: as keys of all queries, and as queries with all keys.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None
    always: tuple[TokenRange, ...] = ()


class RowOutputs(NamedTuple):
    """The outputs of sampled rows of one batch entry for each key block alone.

    The output of a call is a weighted sum of those of its active blocks, so errors follow from these alone. Rows come
    before heads, as in the outputs of fused attentions, so that nothing large is copied.

    Attributes:
        inputs: those of the entry, without the batch axis.
        tokens: (R, Hq) int64.
        unlike: how many of the rows, the last ones, are not spread.
        queries: (R, Hq, D).
        outs: (R, Hq, part of T, D) each.
        lse: (R, Hq, T) float32.
        masses: how much of each row's probability each block has, (R, Hq, T) float32.
    """

    inputs: Inputs
    tokens: torch.Tensor
    unlike: int
    queries: torch.Tensor
    outs: tuple[torch.Tensor, ...]
    lse: torch.Tensor
    masses: torch.Tensor


def row_outputs(inputs: Inputs, rows: SampledRows) -> list[RowOutputs]:
    """Compute the sampled rows of each batch entry."""
    outputs = []
    for entry in range(inputs.q.shape[0]):
        q, k, v = (tensor[entry] for tensor in inputs[:3])
        bias = None if inputs.bias is None else inputs.bias.expand(len(inputs.q), -1, -1, -1)[entry]
        tokens = rows.tokens[entry].T
        queries = _gather_rows(q, tokens)
        outs, lse = block_outputs(queries, k, v, inputs.scale, bias)
        entry_inputs = Inputs(q, k, v, inputs.scale, bias)
        outputs.append(RowOutputs(entry_inputs, tokens, rows.unlike, queries, outs, lse, lse.softmax(dim=2)))
    return outputs


def popular(outputs: list[RowOutputs]) -> torch.Tensor:
    """The key blocks that many rows of a head attend to: bool (B, Hq, T).

    Means of tokens may not show them, such as when many queries look for one key: then chance decides which query
    blocks leave them out, and the sampled rows do not show which.
    """
    masses = _stacked([output.masses.sum(dim=0) for output in outputs], dim=0)
    rows, _, blocks = outputs[0].lse.shape
    return masses >= popular_mass(rows, blocks)


def popular_mass(rows: int, blocks: int) -> float:
    """The probability, summed over the rows, from which on a block is `popular`."""
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

    It is that of the spread rows, or that of all rows if it is larger: unlike rows never lower it.

    Args:
        ranks: (B, Hq, T, T): a block is left out where its rank is at most the cut.
        cuts: (L + 1,) float32; the last one leaves out everything.
        compared: bool (B, Hq, T, T), active blocks whose error is measured too.
        with_tail: also measure the errors with a tail, by which the other blocks contribute the means of their tokens
            (`reference.pooled_tail`).

    Returns:
        Float32 (1, B, Hq, L), or (2, B, Hq, L) with the errors with the tail; with `compared` L + 1, its error first.
    """
    entry_errors = []
    for entry, output in enumerate(outputs):
        compared_blocks = None if compared is None else compared[entry]
        differences = _differences(output, ranks[entry], cuts, compared_blocks, with_tail)
        entry_errors.append(_relative(differences, output.unlike))
    return _stacked(entry_errors, dim=1)


def _differences(
    rows: RowOutputs, ranks: torch.Tensor, cuts: torch.Tensor, compared: torch.Tensor | None, with_tail: bool
) -> torch.Tensor:
    """Norms of the differences from the exact outputs, and last the norms of these outputs: (1 | 2, R, Hq, L + 1)."""
    query_blocks, masses = rows.tokens // BLOCK_TOKENS, rows.masses[:, :, None]
    active = _gather_rows(ranks, query_blocks)[:, :, None] > cuts[:, None]  # (R, Hq, L, T)
    if compared is not None:
        active = torch.cat((_gather_rows(compared, query_blocks)[:, :, None], active), dim=2)
    kept = active * masses
    total = kept.sum(dim=3, keepdim=True)
    lost = [_lost(kept, total, rows)]
    if with_tail:
        total_lse = rows.lse[..., :1] - rows.lse.log_softmax(dim=2)[..., :1]
        tail = (_tail_scores(rows) - total_lse).exp_()[:, :, None].masked_fill(active, 0.0)
        total = total + tail.sum(dim=3, keepdim=True)
        means = block_means(rows.inputs.v).to(lost[0].dtype)
        by_tail = torch.div(tail, total).to(means.dtype).unflatten(1, (len(means), -1))
        added = torch.einsum("rhglt,htd->rhgld", by_tail, means).flatten(1, 2)
        lost.append(_lost(kept, total, rows).sub_(added))
    norms: torch.Tensor = torch.linalg.vector_norm(_stacked(lost, dim=0), dim=4, dtype=torch.float32)
    return norms


def _stacked(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Like torch.stack, but does not copy a single tensor."""
    return torch.stack(tensors, dim) if len(tensors) > 1 else tensors[0].unsqueeze(dim)


def _gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows (R, H) of x (H, N, D), which differ between heads: (R, H, D)."""
    return x.transpose(0, 1).gather(0, rows[..., None].expand(-1, -1, x.shape[2]))


def _lost(kept: torch.Tensor, total: torch.Tensor, rows: RowOutputs) -> torch.Tensor:
    """The exact outputs minus those by the `kept` masses, which sum up to `total`: (R, Hq, L, D).

    Blocks' outputs are summed with their weights in the difference, so that little cancels in 16 bits. A row that keeps
    no block has an output of zeros, as in the kernels.
    """
    weights = torch.empty(kept.shape, dtype=rows.outs[0].dtype, device=kept.device)
    least = torch.finfo(torch.float32).tiny
    torch.addcdiv(rows.masses[:, :, None], kept, total.clamp_min(least), value=-1.0, out=weights)
    parts = weights.split([out.shape[2] for out in rows.outs], dim=3)
    lost: torch.Tensor
    lost, *rest = (part @ out for part, out in zip(parts, rows.outs, strict=True))
    for last in rest:
        lost.add_(last)
    return lost


def _tail_scores(rows: RowOutputs) -> torch.Tensor:
    """The LSE of each block in the tail, (R, Hq, T) float32."""
    inputs, tokens = rows.inputs, rows.tokens
    kv_heads, length, _ = inputs.k.shape
    center = center_of(inputs.k).float()
    means = block_means(inputs.k) - center
    first = tokens - tokens % POOL_TOKENS
    pools = (first + torch.arange(POOL_TOKENS, device=tokens.device)[:, None, None]).clamp_max(length - 1)
    pooled = _gather_rows(inputs.q, pools.flatten(0, 1)).unflatten(0, (POOL_TOKENS, -1))
    pooled = pooled.mean(dim=0, dtype=torch.float32)
    by_means, by_center = (
        torch.einsum("rhgd,htd->rhgt", x.unflatten(1, (kv_heads, -1)), y).flatten(1, 2)
        for x, y in ((pooled, means), (rows.queries.float(), center))
    )
    return torch.add(tokens_of_blocks(inputs.k).log(), by_means + by_center, alpha=inputs.scale)


def _relative(norms: torch.Tensor, unlike: int) -> torch.Tensor:
    """The errors (K, Hq, L - 1) by norms (K, R, Hq, L), the last `unlike` rows of which are not spread."""
    spread, unlike_rows = norms.square().tensor_split((norms.shape[1] - unlike,), dim=1)
    sums = spread.sum(dim=1)
    ratios = sums[..., :-1] / sums[:1, ..., -1:]
    if unlike:
        sums = torch.add(sums, unlike_rows.sum(dim=1), alpha=_WEIGHT_OF_UNLIKE)
        ratios = ratios.maximum(sums[..., :-1] / sums[:1, ..., -1:])
    return ratios.sqrt_()
