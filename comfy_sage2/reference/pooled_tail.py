"""A tail for attention with block lists: the key blocks outside a list contribute by the means of their tokens."""

from __future__ import annotations

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of
from .block_scores import POOL_TOKENS, POOLS_OF_BLOCK, dtype_of, pool_tokens

CENTER_TOKENS = 64


def center_of(k: torch.Tensor) -> torch.Tensor:
    """The mean of up to 64 tokens that are spread evenly over k (..., N, D), in its dtype: (..., 1, D)."""
    count = min(CENTER_TOKENS, k.shape[-2])
    places = torch.arange(count, device=k.device) * k.shape[-2] // count
    return k.index_select(-2, places).mean(dim=-2, keepdim=True)


def add_pooled_tail_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    active_blocks: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Correct the output and the LSE of a call with block lists for the blocks that it left out.

    Such a block counts as one key and one value, the means of its tokens, weighted by its number of tokens. Its scores
    are those of the mean of 16 queries, except for what all keys have in common, `center_of` k: its score is that of
    each query itself. Query blocks with all key blocks active do not change.

    Args:
        q, out: (B, Hq, Nq, D), k, v: (B, Hkv, Nkv, D), any float dtype; out is written to.
        lse: (B, Hq, Nq) float32, natural logarithm, minus infinity for queries of an empty list; written to.
        active_blocks: bool (B or 1, Hq or 1, Tq, Tk), those that the call has computed.
        scale: softmax scale.
    """
    batch, q_heads, q_length, _ = q.shape
    group = q_heads // k.shape[1]
    active_blocks = active_blocks.expand(batch, q_heads, -1, -1)
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        for b in range(batch):
            for head in range(q_heads):
                inputs = q[b, head], k[b, head // group], v[b, head // group]
                queries, keys, values = (tensor.to(dtype_of(q)) for tensor in inputs)
                center = center_of(keys)
                key_means, value_means = block_means(keys - center), block_means(values)
                active = active_blocks[b, head].repeat_interleave(POOLS_OF_BLOCK, dim=0)
                pools = pool_tokens(queries)[0]
                scores = pools @ key_means.T * scale + tokens_of_blocks(keys).log()
                scores = scores.masked_fill(active[: pools.shape[0]], -torch.inf)
                pool_lse = scores.logsumexp(dim=1)
                # A sub-pool without a tail has the LSE -inf, which would give NaN.
                shares = (scores - pool_lse.masked_fill(pool_lse == -torch.inf, 0.0)[:, None]).exp()
                pool = torch.arange(q_length, device=q.device) // POOL_TOKENS  # of each query
                tails = pool_lse[pool] + (queries @ center.T * scale)[:, 0]
                listed = lse[b, head].to(queries.dtype)
                total = torch.logaddexp(listed, tails)
                corrected = (
                    out[b, head].to(queries.dtype) * (listed - total).exp()[:, None]
                    + (shares @ value_means)[pool] * (tails - total).exp()[:, None]
                )
                has_tail = pool_lse[pool] != -torch.inf
                out[b, head] = torch.where(has_tail[:, None], corrected.to(out.dtype), out[b, head])
                lse[b, head] = torch.where(has_tail, total.to(lse.dtype), lse[b, head])


def block_means(x: torch.Tensor) -> torch.Tensor:
    """The mean of every 128 tokens of x (..., N, D): (..., T, D) float32, or float64 for a float64 `x`."""
    dtype = dtype_of(x)
    full = x.shape[-2] // BLOCK_TOKENS * BLOCK_TOKENS
    means: torch.Tensor = x[..., :full, :].unflatten(-2, (-1, BLOCK_TOKENS)).mean(dim=-2, dtype=dtype)
    if full == x.shape[-2]:
        return means
    return torch.cat((means, x[..., full:, :].mean(dim=-2, keepdim=True, dtype=dtype)), dim=-2)


def tokens_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """How many tokens each block of x (..., N, D) has: (T,) float32, or float64 for a float64 `x`."""
    counts = torch.full((blocks_of(x.shape[-2]),), float(BLOCK_TOKENS), dtype=dtype_of(x), device=x.device)
    counts[-1] -= -x.shape[-2] % BLOCK_TOKENS
    return counts
