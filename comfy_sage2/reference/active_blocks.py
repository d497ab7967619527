"""Block-sparse attention: which scores of a step belong to live tiles (128 queries x 128 keys)."""

from __future__ import annotations

import math

import torch

from ..block_mask import TILE_TOKENS, tiles_of


def overlapping(live_tiles: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    """The part of (B, Hq, Tq, Tk) whose tiles have some of the query tokens `rows` and the key tokens `keys`."""
    return live_tiles[:, :, _tiles(rows), _tiles(keys)]


def mask_dead_tiles_(scores: torch.Tensor, live: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    """Set the scores (B, Hq, rows, keys) of dead tiles to -inf; `live` as `overlapping` gives it for these tokens."""
    live = live.repeat_interleave(TILE_TOKENS, dim=2).repeat_interleave(TILE_TOKENS, dim=3)
    first_row, first_key = rows.start % TILE_TOKENS, keys.start % TILE_TOKENS
    live = live[:, :, first_row : first_row + scores.shape[2], first_key : first_key + scores.shape[3]]
    return scores.masked_fill_(~live, -math.inf)


def _tiles(tokens: slice) -> slice:
    return slice(tokens.start // TILE_TOKENS, tiles_of(tokens.stop))
