"""The order in which the attention loop goes through queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .options import ReferenceOptions

# Scores held at a time over all heads: large enough to hide PyTorch's cost a call, small enough for a CPU's cache.
_TILE_SCORES = 1 << 19
_TILE_SCORES_ON_GPU = 1 << 26


def row_tiles(q: torch.Tensor, options: ReferenceOptions) -> Iterator[slice]:
    """The queries of q (B, Hq, Nq, D) that are computed at a time; each slice starts at a multiple of block_q."""
    block_q = options.groups.block_q
    tile = _TILE_SCORES_ON_GPU if q.is_cuda else _TILE_SCORES
    rows = tile // (q.shape[0] * q.shape[1] * _keys_per_step(options))
    rows = max(rows // block_q, 1) * block_q
    for start in range(0, q.shape[2], rows):
        yield slice(start, min(start + rows, q.shape[2]))


def _keys_per_step(options: ReferenceOptions) -> int:
    return options.groups.block_k if options.keys_per_step is None else options.keys_per_step


def key_steps(kv_length: int, options: ReferenceOptions) -> Iterator[slice]:
    """The keys that the online softmax takes in at a time, in its order."""
    step = _keys_per_step(options)
    starts = range(0, kv_length, step)
    for start in reversed(starts) if options.last_keys_first else starts:
        yield slice(start, min(start + step, kv_length))
