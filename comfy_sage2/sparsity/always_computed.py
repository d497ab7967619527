"""Tokens whose blocks are never left out, such as those of text and sound beside a video."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of
from ..system.readback import constant

TokenRange = tuple[int, int]  # the first token, and the token after the last one


@lru_cache(maxsize=64)
def blocks_with(ranges: tuple[TokenRange, ...], length: int) -> torch.Tensor:
    """Which blocks of `length` tokens have tokens of `ranges`: bool (blocks,) on the CPU. Do not write to it."""
    blocks = torch.zeros(blocks_of(length), dtype=torch.bool, device="cpu")
    for start, stop in ranges:
        if start < min(stop, length):
            blocks[start // BLOCK_TOKENS : blocks_of(min(stop, length))] = True
    return blocks


def raise_always_computed_(scores: torch.Tensor, ranges: tuple[TokenRange, ...], length: int) -> None:
    """Set the scores (B, Hq, T, T) of the blocks with tokens of `ranges` to +inf: as keys and as queries."""
    if ranges:
        raised = constant(scores.device, blocks_with, ranges, length)
        scores.masked_fill_(raised | raised[:, None], torch.inf)
