"""Random inputs and block masks, and the token mask that a block mask stands for."""

from __future__ import annotations

import random
from typing import Any

import torch

from comfy_sage2 import BlockMask
from comfy_sage2.block_mask import blocks_of


def full_blocks(q_length: int, kv_length: int, *, is_causal: bool = False, batch: int = 1, heads: int = 1) -> BlockMask:
    shape = (batch, heads, blocks_of(q_length), blocks_of(kv_length))
    return BlockMask.from_dense(torch.ones(shape, dtype=torch.bool), is_causal=is_causal)


LISTS = full_blocks(200, 330)  # for `inputs()`
FLAG = torch.zeros(1, dtype=torch.int32)
# Invalid lists for one query block and three key blocks, each with the valid list that gives the same result.
INVALID_LISTS = [
    ([3, 1, 99, 0], [2, 1, 0, -1]),
    ([3, 1, -1, 0], [2, 1, 0, -1]),
    ([3, 2, 2, 0], [2, 2, 0, -1]),
    ([9, 2, 1, 0], [3, 2, 1, 0]),
    ([32767, 2, 1, 1], [2, 2, 1, -1]),
    ([-5, 2, 1, 0], [0, -1, -1, -1]),
    ([3, 32767, -32768, 3], [0, -1, -1, -1]),
]


def inputs(
    batch: int = 2, heads: tuple[int, int] = (2, 1), lengths: tuple[int, int] = (200, 330), head_dim: int = 64
) -> Any:
    q = torch.randn(batch, heads[0], lengths[0], head_dim)
    k, v = (torch.randn(batch, heads[1], lengths[1], head_dim) for _ in range(2))
    return q, k, v


def random_lists(q: torch.Tensor, k: torch.Tensor, *, batch: int | None = None, heads: int | None = None) -> BlockMask:
    """Lists of random key blocks in random order, from torch's seed; entries past the count are random, too."""
    chance = random.Random(int(torch.randint(2**31, ())))
    q_blocks, blocks = -(-q.shape[2] // 128), -(-k.shape[2] // 128)
    shape = (batch or q.shape[0], heads or q.shape[1], q_blocks, 1 + blocks)
    lists = torch.randint(-(2**15), 2**15, shape).to(torch.int16)
    for each in lists.view(-1, 1 + blocks):
        active = chance.sample(range(blocks), chance.randint(0, blocks))
        each[: 1 + len(active)] = torch.tensor([len(active), *active])
    return BlockMask(lists)


def expanded(lists: BlockMask, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The token mask of block lists, bool (B, Hq, Nq, Nkv), straight from the definition."""
    mask = torch.zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=torch.bool)
    all_lists = lists.lists.expand(q.shape[0], q.shape[1], -1, -1)
    blocks = all_lists.shape[3] - 1
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            for q_block, (count, *entries) in enumerate(all_lists[batch, head].tolist()):
                for block in entries[: min(max(count, 0), blocks)]:
                    if 0 <= block < blocks:
                        mask[batch, head, 128 * q_block : 128 * (q_block + 1), 128 * block : 128 * (block + 1)] = True
    return mask
