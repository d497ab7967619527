"""Which tokens of Q and K share a scale: per token, thread, block or tensor (section 3.2 and appendix A.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Granularity = Literal["token", "thread", "block", "tensor"]

# In the accumulator of an integer mma a thread holds one row of every 8 and two neighboring columns of every 8.
_ROWS_OF_A_TILE = 8
_COLUMN_PAIRS_OF_A_TILE = 4


@dataclass(frozen=True)
class GroupScheme:
    """The quantization groups of one kernel.

    Attributes:
        q, k: which tokens share a scale.
        block_q: tokens of a Q block, which smooth Q averages over; a multiple of 8 * warps.
        block_k: tokens of a K block, a multiple of 8. The online softmax steps by it unless `keys_per_step` is set.
        warps: the warps that split a Q block, c_w in the paper.
    """

    name: str
    q: Granularity
    k: Granularity
    block_q: int = 128
    block_k: int = 64
    warps: int = 4


ADA = GroupScheme("ADA", q="thread", k="thread")
# On wgmma a thread owns whole rows, so Q per token costs nothing.
HOPPER_8B = GroupScheme("HOPPER_8B", q="token", k="thread")
PER_TOKEN = GroupScheme("PER_TOKEN", q="token", k="token")
PER_BLOCK = GroupScheme("PER_BLOCK", q="block", k="block")
PER_TENSOR = GroupScheme("PER_TENSOR", q="tensor", k="tensor")


def query_groups(length: int, scheme: GroupScheme, device: torch.device | None = None) -> torch.Tensor:
    """The group of each query token: (length,) int64, numbered from 0.

    Per thread, rows i, i + 8, i + 16, ... of each warp's block_q / warps rows form one group.
    """
    token = torch.arange(length, device=device)
    if scheme.q == "thread":
        return token // (scheme.block_q // scheme.warps) * _ROWS_OF_A_TILE + token % _ROWS_OF_A_TILE
    return _plain_groups(token, scheme.q, scheme.block_q)


def key_groups(length: int, scheme: GroupScheme, device: torch.device | None = None) -> torch.Tensor:
    """The group of each key token: (length,) int64, numbered from 0.

    Per thread, columns 8j + 2t and 8j + 2t + 1 of each block_k keys, for all j, form group t = 0..3.
    """
    token = torch.arange(length, device=device)
    if scheme.k == "thread":
        return token // scheme.block_k * _COLUMN_PAIRS_OF_A_TILE + token % 8 // 2
    return _plain_groups(token, scheme.k, scheme.block_k)


def _plain_groups(token: torch.Tensor, granularity: Granularity, block: int) -> torch.Tensor:
    if granularity == "token":
        return token
    if granularity == "block":
        return token // block
    return torch.zeros_like(token)
