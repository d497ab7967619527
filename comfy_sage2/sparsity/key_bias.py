"""A mask that is the same for all queries, as a bias of each key, and its effect on the choice of key blocks."""

from __future__ import annotations

import torch

from ..reference.block_scores import LOWEST_BLOCK_SCORE, POOL_TOKENS, POOLS_OF_BLOCK
from ..reference.hidden_keys import shows


def key_bias(mask: torch.Tensor, length: int) -> torch.Tensor:
    """What the mask adds to the scores of each key, minus its largest value, which does not change the softmax.

    mask: (B | 1, Hq | 1, 1, Nkv | 1), bool (True = attend) or additive. Returns float32 (B | 1, Hq | 1, 1, Nkv), -inf
    where a key is hidden; NaN stays.
    """
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)
    else:
        hidden = ~shows(mask)  # as in attention, no key is hidden if all are
        bias = mask.float().masked_fill(hidden & ~hidden.all(dim=3, keepdim=True), -torch.inf)
    largest = bias.amax(dim=3, keepdim=True)
    # Where all keys are hidden, -inf - -inf would be NaN.
    return (bias - largest.masked_fill(largest == -torch.inf, 0.0)).expand(-1, -1, -1, length)


def without_hidden_keys(
    k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, *, q_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v (B, Hkv, Nkv, D) in which hidden keys have no effect, whatever they hold, and values of zero.

    Each hidden key becomes the mean of the visible keys of its sub-pool of `block_scores`, or of all visible keys if
    the sub-pool has none. So the mean of a sub-pool is that of its visible keys. With a mask for each head of q, each
    of these heads gets its own k and v.
    """
    if bias.shape[1] != 1:
        k, v = (tensor.repeat_interleave(q_heads // tensor.shape[1], dim=1) for tensor in (k, v))
    hidden = (bias == -torch.inf).mT  # (B | 1, Hq | 1, Nkv, 1)
    visible = k.masked_fill(hidden, 0.0)
    sums = _pools(visible, 2).sum(dim=3, dtype=torch.float32)  # (B, H, pools, D)
    counts = _pools((~hidden).float(), 2).sum(dim=3)
    mean = sums.sum(dim=2, keepdim=True) / counts.sum(dim=2, keepdim=True).clamp_min(1.0)
    means = torch.where(counts > 0.0, sums / counts.clamp_min(1.0), mean).to(k.dtype)
    means = means.repeat_interleave(POOL_TOKENS, dim=2)[:, :, : k.shape[2]]
    return torch.where(hidden, means, visible), v.masked_fill(hidden, 0.0)


def add_to_scores(scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add the bias to scores (B, Hq, Tq, Tk) that `block_scores` computed from the k of `without_hidden_keys`.

    A block's share is multiplied by the largest factor of its sub-pools, relative to the mean factor of all keys, so
    that no share is estimated too low. The lowest score is LOWEST_BLOCK_SCORE, which blocks of hidden keys have.
    """
    factors = bias.exp()
    tokens = _pools(torch.ones_like(factors[:1, :1]), 3).sum(dim=4)
    pool_factors = _pools(factors, 3).sum(dim=4) / tokens
    padded = torch.nn.functional.pad(pool_factors, (0, -pool_factors.shape[3] % POOLS_OF_BLOCK))
    block_factors = padded.unflatten(3, (-1, POOLS_OF_BLOCK)).amax(dim=4)
    mean_factor = factors.mean(dim=3, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    biased: torch.Tensor = (scores + (block_factors / mean_factor).log2()).clamp_min(LOWEST_BLOCK_SCORE)
    return biased


def _pools(x: torch.Tensor, axis: int) -> torch.Tensor:
    """`x` with its token axis `axis` split into sub-pools and their tokens, padded with zeros."""
    padding = [0, 0] * (x.dim() - 1 - axis) + [0, -x.shape[axis] % POOL_TOKENS]
    pools: torch.Tensor = torch.nn.functional.pad(x, padding).unflatten(axis, (-1, POOL_TOKENS))
    return pools
