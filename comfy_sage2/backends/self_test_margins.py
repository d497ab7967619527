"""Queries and keys whose blocks have the same margins in whatever order kernels take the blocks, and those margins."""

from __future__ import annotations

import math

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of
from ..quantize.formats import FP32
from ..reference.block_margins import block_margins
from ..reference.options import ReferenceOptions

# What a margin may be off, in octaves. 8 bits cost a quarter of it here. Where blocks, heads, rows or keys are mistaken
# or left out some margin is off by 2 or more.
MARGIN_BOUND = 0.5
_NEAREST, _NEARER, _FIRST = 8, 9, 10  # channels; from the last one on each block has its own
_K = 8.0
_NOISE = 0.3
_FAR, _STEP, _LEVELS = -6.0, -3.0, 4  # octaves
_NEAREST_BY, _NEARER_BY = 6.0, 4.0  # octaves


def grade_(q: torch.Tensor, k: torch.Tensor) -> None:
    """Grade the blocks of q (B, Hq, N, D) and k (B, Hkv, N, D), both random, 3 * 128 + 56 < N <= 4 * 128 and D >= 64.

    One key of each block, the same in all of them, is nearest to all queries. Rows have their largest score in the
    first block, in the last one and in that of their own tokens. One of these comes first in every kernel: it has the
    running maximum that margins are relative to. The other blocks lie far below it, at levels of their own. In the
    first and the last rows the nearest keys of these blocks are still nearer to a single query, which alone decides the
    margin.
    """
    blocks, octave = blocks_of(k.shape[2]), math.sqrt(q.shape[3]) / (_K * math.log2(math.e))
    own = torch.arange(blocks, device=k.device)
    block = torch.arange(k.shape[2], device=k.device) // BLOCK_TOKENS
    head = torch.arange(q.shape[1], device=q.device)[:, None, None]
    level = _FAR + _STEP * ((2 * head + own[:, None] + 3 * own) % _LEVELS)  # (Hq, Tq, Tk)
    level[:, (own[:, None] == own) | (own == 0) | (own == blocks - 1)] = 0.0
    of_blocks_ = slice(_FIRST, _FIRST + blocks)
    nearest = own * BLOCK_TOKENS + (37 * own + 5) % 56

    q.mul_(_NOISE)
    q[..., of_blocks_] = (octave * level[:, block]).to(q.dtype)
    q[..., _NEAREST], q[..., _NEARER] = octave * _NEAREST_BY, 0.0
    q[..., [BLOCK_TOKENS - 9, -7], _NEARER] = octave * _NEARER_BY
    k[:, :, nearest] = k[:, :, :1].clone()
    k[..., of_blocks_] = _K * (block[:, None] == own).to(k.dtype)
    k[..., _NEAREST] = k[..., _NEARER] = 0.0
    k[:, :, nearest, _NEAREST] = _K
    k[:, :, nearest[1:-1], _NEARER] = _K


def margins_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The running margins of these blocks, (B, Hq, Tq, Tk) float32."""
    return block_margins(q, k, ReferenceOptions(qk_format=FP32), running=True)
