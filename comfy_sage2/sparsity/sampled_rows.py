"""The query rows on which a head's error is measured."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of
from ..reference.block_scores import POOL_TOKENS
from ..system.readback import constant
from .always_computed import TokenRange, blocks_with

LEAST_ROWS, MOST_ROWS = 64, 256
_PAIRS = 1 << 22  # of a sampled row and a key in one head, for row counts between LEAST_ROWS and MOST_ROWS
GROUP = 8  # heads that have the same spread rows
_POOLS = 640  # sub-pools of 16 tokens in which unlike rows are searched for: 10,240 tokens


class Places(NamedTuple):
    """Tokens, int64, in one tensor, so that one copy takes them to a device: those of `spread`, then those of `pools`.

    Attributes:
        tokens: (numbers,).
        spread_shape, pools_shape: the shapes of its two parts.
    """

    tokens: torch.Tensor
    spread_shape: tuple[int, int]
    pools_shape: tuple[int, int]

    @property
    def spread(self) -> torch.Tensor:
        """The tokens of the spread rows, (groups of 8 heads, rows); in short calls all tokens, for all heads."""
        return self.tokens[: math.prod(self.spread_shape)].view(self.spread_shape)

    @property
    def pools(self) -> torch.Tensor:
        """The first tokens of sub-pools, (unlike rows, sub-pools): each unlike row is searched for in some of them."""
        return self.tokens[math.prod(self.spread_shape) :].view(self.pools_shape)


def places(length: int, heads: int, sample: int, always: tuple[TokenRange, ...], device: torch.device) -> Places:
    """The places of the rows of calls of `length` tokens, on `device`.

    Args:
        sample: the number of the sample. Each sample, and in it each group of 8 heads, has other rows.
        always: tokens in whose blocks queries attend to all keys and are not sampled.
    """
    _, *shapes = _drawn(length, heads, sample, always)
    return Places(constant(device, _tokens, length, heads, sample, always), *shapes)


def _tokens(*arguments: Any) -> torch.Tensor:
    return _drawn(*arguments).tokens


@lru_cache(maxsize=8)
def _drawn(length: int, heads: int, sample: int, always: tuple[TokenRange, ...]) -> Places:
    """`Places` on the CPU."""
    blocks = blocks_with(always, length).logical_not().nonzero()[:, 0]
    tokens = _tokens_in(blocks, length)
    if tokens <= MOST_ROWS:
        return Places(_at(blocks, torch.arange(tokens, device="cpu")), (1, tokens), (0, 1))
    random = torch.Generator().manual_seed(sample)
    unlike = min(MOST_ROWS, max(LEAST_ROWS, _PAIRS // length), tokens // 4) // 4
    spread = _at(blocks, _random_in_each_part(tokens, (-(-heads // GROUP), 3 * unlike), random))
    pools = min(_POOLS, tokens // POOL_TOKENS) // unlike * unlike
    first = _at(blocks, POOL_TOKENS * _random_in_each_part(tokens // POOL_TOKENS, (pools,), random))
    shapes = (spread.shape[0], spread.shape[1]), (unlike, pools // unlike)
    return Places(torch.cat((spread.flatten(), first)), *shapes)


class SampledRows(NamedTuple):
    """Some rows of each head.

    Attributes:
        tokens: (B, Hq, R) int64.
        unlike: how many of them, the last ones, were searched for because such rows lose more than others.
    """

    tokens: torch.Tensor
    unlike: int


def sampled_rows(q: torch.Tensor, sample: int, always: tuple[TokenRange, ...] = ()) -> SampledRows:
    """LEAST_ROWS to MOST_ROWS query tokens to measure, the fewer the longer q is; all of at most MOST_ROWS.

    Three quarters of them are spread: one at random in each of as many equal parts of the sequence. The others are
    unlike: in each equal part, the row that differs most from the mean of its 16 tokens, by which blocks are chosen.
    Such rows lose most, and where they are rare, spread rows miss them. In a long sequence only some places are
    searched.

    q: (B, Hq, N, D). sample, always: as for `places`.
    """
    batch, heads, length, _ = q.shape
    drawn = places(length, heads, sample, always, q.device)
    pools = drawn.pools
    unlike = len(pools)
    spread = drawn.spread.repeat_interleave(GROUP if unlike else heads, dim=0)[:heads].expand(batch, -1, -1)
    if unlike == 0:
        return SampledRows(spread, 0)
    searched = (pools[..., None] + torch.arange(POOL_TOKENS, device=q.device)).flatten(1)
    pooled = q.index_select(2, searched.flatten()).unflatten(2, (-1, POOL_TOKENS)).float()
    distances = torch.linalg.vector_norm(pooled - pooled.mean(dim=3, keepdim=True), dim=4)
    most = distances.view(batch, heads, unlike, -1).argmax(dim=3, keepdim=True)
    unlike_rows = searched.expand(batch, heads, -1, -1).gather(3, most)[..., 0]
    return SampledRows(torch.cat((spread, unlike_rows), dim=2), unlike)


def _tokens_in(blocks: torch.Tensor, length: int) -> int:
    """How many of `length` tokens the blocks have; the last block of the sequence may be ragged."""
    if len(blocks) == 0:
        return 0
    missing = -length % BLOCK_TOKENS if int(blocks[-1]) == blocks_of(length) - 1 else 0
    return len(blocks) * BLOCK_TOKENS - missing


def _at(blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The tokens at `places` of a sequence of only `blocks`."""
    return blocks[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS


def _random_in_each_part(count: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Along the last axis of `shape`, a random number from each of as many equal parts of range(count)."""
    parts = shape[-1]
    ends = torch.arange(parts + 1, device="cpu") * count // parts
    places = torch.rand(shape, generator=random, dtype=torch.float64, device="cpu") * ends.diff()
    return ends[:-1] + places.long()
