"""How much of its queries' probability each key block is estimated to hold, from means of 16 tokens of Q and K."""

from __future__ import annotations

import math

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of

POOL_TOKENS = 16  # tokens of a sub-pool
POOLS_OF_BLOCK = BLOCK_TOKENS // POOL_TOKENS
LOWEST_BLOCK_SCORE = -126.0
"""log2 of the smallest normal float32: a share below it counts as it."""

_SCORE_BYTES = 64 << 20  # of the scores of sub-pools that are in memory at once


def pool_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of each 16 tokens, and how many tokens each of them has: the last one may have fewer.

    x: (..., N, D), any float dtype. Returns (..., pools, D) and (pools,), float32, or float64 for a float64 `x`.
    """
    x = x.to(dtype_of(x))
    length = x.shape[-2]
    pools = -(-length // POOL_TOKENS)
    counts = x.new_full((pools,), float(POOL_TOKENS))
    counts[-1] = length - (pools - 1) * POOL_TOKENS
    padded = torch.nn.functional.pad(x, (0, 0, 0, pools * POOL_TOKENS - length))
    return padded.unflatten(-2, (pools, POOL_TOKENS)).sum(dim=-2) / counts[:, None], counts


def block_scores(q: torch.Tensor, k: torch.Tensor, *, scale: float, block_means: bool = False) -> torch.Tensor:
    """log2 of the share of probability that each key block is estimated to have for each block of queries.

    Sub-pools of 16 tokens stand for their tokens: a sub-pool of Q attends to all sub-pools of K, each of which counts
    as often as it has tokens; a key block has the sum of its sub-pools, and a query block the mean over its queries.
    So the rows of a head and a query block add up to 1.

    Args:
        q: (B, Hq, Nq, D), k: (B, Hkv, Nkv, D), any float dtype; head h of q reads head h // (Hq / Hkv) of k.
        scale: softmax scale.
        block_means: the mean of a key block stands for its tokens, as in `pooled_tail`. With a tail these scores choose
            better: what they overestimate is computed, and what sub-pools find in other blocks the tail has not.

    Returns:
        (B, Hq, Tq, Tk) float32 on q's device, at least LOWEST_BLOCK_SCORE. NaN in a sub-pool of Q makes the scores
        of its block NaN, in one of K those of its head. float64 inputs are computed and returned in float64.
    """
    shape = (q.shape[0], q.shape[1], blocks_of(q.shape[2]), blocks_of(k.shape[2]))
    scores = q.new_empty(shape, dtype=dtype_of(q))
    group = q.shape[1] // k.shape[1]
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        for batch in range(q.shape[0]):
            for head in range(q.shape[1]):
                _scores_of_head_(scores[batch, head], q[batch, head], k[batch, head // group], scale, block_means)
    return scores


def _scores_of_head_(scores: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float, block_means: bool) -> None:
    """Write `block_scores` of q (Nq, D) and k (Nkv, D) into scores (Tq, Tk)."""
    query_pools, query_counts = pool_tokens(q)
    key_pools, key_counts = pool_tokens(k)
    if block_means:
        counts = _sums_of_blocks(key_counts)
        means = _sums_of_blocks((key_pools * key_counts[:, None]).T).T / counts[:, None]
        key_pools = means.repeat_interleave(POOLS_OF_BLOCK, dim=0)[: key_pools.shape[0]]
    # The softmax is the same for all vectors that are taken from K; what its tokens have in common costs digits.
    key_pools = key_pools - key_pools.mean(dim=0)
    step = max(_SCORE_BYTES // (key_pools.shape[0] * key_pools.itemsize) // POOLS_OF_BLOCK, 1)  # query blocks
    for first in range(0, scores.shape[0], step):
        pools = slice(first * POOLS_OF_BLOCK, (first + step) * POOLS_OF_BLOCK)
        of_pools = query_pools[pools] @ key_pools.T * scale + key_counts.log()
        shares = _sums_of_blocks(of_pools.softmax(dim=1))
        weights = query_counts[pools]
        of_blocks = _sums_of_blocks((shares * weights[:, None]).T).T / _sums_of_blocks(weights)[:, None]
        scores[first : first + step] = of_blocks.log2().clamp_min(LOWEST_BLOCK_SCORE)


def _sums_of_blocks(of_pools: torch.Tensor) -> torch.Tensor:
    """Along the last axis, the sums over the sub-pools of each block: (..., pools) -> (..., blocks)."""
    pools = of_pools.shape[-1]
    padded = torch.nn.functional.pad(of_pools, (0, -pools % POOLS_OF_BLOCK))
    sums: torch.Tensor = padded.unflatten(-1, (-1, POOLS_OF_BLOCK)).sum(dim=-1)
    return sums


def dtype_of(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def highest_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest scores of each row (..., Tk), as bool: NaN counts as the highest, ties go to lower blocks."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def blocks_of_share(share: float, key_blocks: int) -> int:
    """How many of `key_blocks` a share in (0, 1] is: rounded half up, at least one."""
    return max(1, math.floor(share * key_blocks + 0.5))
