"""Block-sparse attention: which scores of a step belong to active blocks (128 queries x 128 keys)."""

from __future__ import annotations

import math

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of


def overlapping(active_blocks: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    """The part of (B, Hq, Tq, Tk) whose blocks contain any of the query tokens `rows` and of the key tokens `keys`."""
    return active_blocks[:, :, _blocks(rows), _blocks(keys)]


def mask_skipped_blocks_(scores: torch.Tensor, active: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    """Set the scores (B, Hq, rows, keys) of skipped blocks to -inf; `active` comes from `overlapping`."""
    active = active.repeat_interleave(BLOCK_TOKENS, dim=2).repeat_interleave(BLOCK_TOKENS, dim=3)
    first_row, first_key = rows.start % BLOCK_TOKENS, keys.start % BLOCK_TOKENS
    active = active[:, :, first_row : first_row + scores.shape[2], first_key : first_key + scores.shape[3]]
    return scores.masked_fill_(~active, -math.inf)


def _blocks(tokens: slice) -> slice:
    return slice(tokens.start // BLOCK_TOKENS, blocks_of(tokens.stop))
