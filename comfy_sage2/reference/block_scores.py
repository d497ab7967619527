"""Estimates how much of its queries' probability each key block holds, from means of 16 tokens of Q and K."""

from __future__ import annotations

import math

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of

POOL_TOKENS = 16  # tokens of a sub-pool
POOLS_OF_BLOCK = BLOCK_TOKENS // POOL_TOKENS
LOWEST_BLOCK_SCORE = -126.0
"""log2 of the smallest normal float32; lower scores are raised to it."""

_SCORE_BYTES = 64 << 20  # of the scores of sub-pools that are in memory at once


def pool_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of every 16 tokens, and how many tokens each mean has: the last one may have fewer.

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
    """Estimate the share of probability that each key block has for each block of queries, as log2.

    Sub-pools of 16 tokens stand for their tokens: a sub-pool of Q attends to all sub-pools of K, each weighted by its
    number of tokens; a key block has the sum of its sub-pools, and a query block the mean over its queries. So the
    shares of a head and a query block add up to 1.

    Args:
        q: (B, Hq, Nq, D), k: (B, Hkv, Nkv, D), any float dtype; head h of q reads head h // (Hq / Hkv) of k.
        scale: softmax scale.
        block_means: the mean of a key block stands for its tokens, as in `pooled_tail`. With a tail these scores choose
            better: blocks that they overestimate are computed, and the tail lacks what only sub-pools find in the rest.

    Returns:
        (B, Hq, Tq, Tk) float32 on q's device, at least LOWEST_BLOCK_SCORE. NaN in a sub-pool of Q makes the scores of
        its block NaN; NaN in one of K makes those of its head NaN. float64 inputs give float64 scores.
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
    # Subtracting one vector from all of K does not change the softmax; what K's tokens have in common costs digits.
    key_pools = key_pools - key_pools.mean(dim=0)
    step = max(_SCORE_BYTES // (key_pools.shape[0] * key_pools.itemsize) // POOLS_OF_BLOCK, 1)  # query blocks
    for first in range(0, scores.shape[0], step):
        pools = slice(first * POOLS_OF_BLOCK, (first + step) * POOLS_OF_BLOCK)
        pool_scores = query_pools[pools] @ key_pools.T * scale + key_counts.log()
        pool_shares = _sums_of_blocks(pool_scores.softmax(dim=1))
        weights = query_counts[pools]
        shares = _sums_of_blocks((pool_shares * weights[:, None]).T).T / _sums_of_blocks(weights)[:, None]
        scores[first : first + step] = shares.log2().clamp_min(LOWEST_BLOCK_SCORE)


def _sums_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """Along the last axis, the sums over the sub-pools of each block: (..., pools) -> (..., blocks)."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % POOLS_OF_BLOCK))
    sums: torch.Tensor = padded.unflatten(-1, (-1, POOLS_OF_BLOCK)).sum(dim=-1)
    return sums


def dtype_of(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def highest_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest scores of each row (..., Tk), as bool: NaN counts as the highest, ties go to lower blocks."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def blocks_of_share(share: float, key_blocks: int) -> int:
    """The number of blocks in a share, in (0, 1], of `key_blocks`: rounded half up, at least one."""
    return max(1, math.floor(share * key_blocks + 0.5))
