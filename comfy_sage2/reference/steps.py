"""The order in which the attention loop goes through queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..block_mask import BLOCK_TOKENS
from .options import ReferenceOptions

# Scores in memory at a time, over all heads: enough to hide PyTorch's cost per call, few enough for a CPU's cache.
_TILE_SCORES = 1 << 19
_TILE_SCORES_ON_GPU = 1 << 26


def row_tiles(q: torch.Tensor, options: ReferenceOptions) -> Iterator[slice]:
    """The queries of q (B, Hq, Nq, D) that are computed at a time; each slice starts at a multiple of block_q."""
    rows = block_q = options.groups.block_q
    if not options.diagonal_early:  # with it, blocks differ in the order of their keys
        tile = _TILE_SCORES_ON_GPU if q.is_cuda else _TILE_SCORES
        rows = tile // (q.shape[0] * q.shape[1] * _keys_per_step(options))
        rows = max(rows // block_q, 1) * block_q
    for start in range(0, q.shape[2], rows):
        yield slice(start, min(start + rows, q.shape[2]))


def _keys_per_step(options: ReferenceOptions) -> int:
    return options.groups.block_k if options.keys_per_step is None else options.keys_per_step


def key_steps(
    rows: slice, q_length: int, kv_length: int, options: ReferenceOptions, *, is_causal: bool
) -> Iterator[slice]:
    """The keys of each step of the softmax of `rows` (one block, with `diagonal_early`), in its order."""
    has_diagonal = is_causal or q_length == kv_length
    if is_causal:
        kv_length = min(kv_length, rows.stop)
    step = _keys_per_step(options)
    starts = list(range(0, kv_length, step))
    if options.last_keys_first:
        starts.reverse()
    if options.diagonal_early and has_diagonal:
        together = max(step, BLOCK_TOKENS)  # the steps of a block stay together
        diagonal, last = (rows.start + options.groups.block_q // 2) // together, (kv_length - 1) // together

        def place(start: int) -> int:
            if options.last_keys_first and start // together == last:
                return 0
            return 1 if start // together == diagonal else 2

        starts.sort(key=place)
    for start in starts:
        yield slice(start, min(start + step, kv_length))
