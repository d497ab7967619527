"""Which tiles of 128 queries and 128 keys hold no probability worth computing."""

from __future__ import annotations

import math

import torch

from ..block_mask import TILE_TOKENS, tiles_of
from .options import ReferenceOptions
from .preparation import prepare
from .scores import mask_scores_, tile_scores
from .steps import key_steps, row_tiles

LOSSLESS = -18.81
"""log2 of the largest P that E4M3 rounds to zero, rounded down.

448 P is stored. The smallest number of E4M3 is 2^-9, and 2^-10 lies half way to zero and rounds to it, the even one. So
P is lost from 448 P <= 2^-10 on: s - m <= -10 - log2(448) = -18.807, in natural units -13.04.
"""


def tile_gaps(
    q: torch.Tensor,
    k: torch.Tensor,
    options: ReferenceOptions | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    running: bool = False,
) -> torch.Tensor:
    """The largest s - m of each tile, in units of log2: (B, Hq, Tq, Tk) float32, at most 0; -inf where all is masked.

    s are the scaled, masked scores of `reference_attention` with these arguments, and m is the maximum of the score's
    row. So 2^gap bounds what any key of the tile has of its row's largest probability.

    Args:
        q, k, options, scale, is_causal, attn_mask: as for `reference_attention`.
        running: m is the maximum over the keys that the online softmax has met by the end of the score's step, which
            is what P is rounded with, and not that of the whole row. No gap is smaller then. Tiles of at most LOSSLESS
            add nothing to P V in E4M3: a call without them gives the same bits where the row sum adds P after its
            rounding (`sum_quantized_p`, as the 8-bit and 4-bit kernels do). Where it adds P before that, each key left
            out takes at most 2^LOSSLESS from a row sum of 1 or more.
    """
    options = ReferenceOptions() if options is None else options
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    shape = (q.shape[0], q.shape[1], tiles_of(q.shape[2]), tiles_of(k.shape[2]))
    gaps = q.new_full(shape, -math.inf, dtype=torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        prepared = prepare(q, k, k[..., :1], options)  # V plays no part in the scores
        for rows in row_tiles(q, options):
            maximum = gaps.new_full((*shape[:2], rows.stop - rows.start), -math.inf)
            peaks = []  # (tile, the rows' largest scores in a step's part of it, the maximum that P is rounded with)
            for keys in key_steps(rows, q.shape[2], k.shape[2], options, is_causal=is_causal):
                scores = tile_scores(prepared, rows, keys, scale, options.groups.block_q)
                mask_scores_(scores, attn_mask, is_causal, rows, keys)
                maximum = torch.maximum(maximum, scores.amax(dim=3))
                for tile in range(keys.start // TILE_TOKENS, tiles_of(keys.stop)):
                    first = max(tile * TILE_TOKENS - keys.start, 0)
                    part = scores[..., first : (tile + 1) * TILE_TOKENS - keys.start]
                    peaks.append((tile, part.amax(dim=3), maximum))
            for tile, peak, met in peaks:
                shift = met if running else maximum
                # Rows that have met masked keys alone: 0 in the place of -inf keeps their gap from being NaN.
                gap = peak - shift.masked_fill(shift == -math.inf, 0.0)
                _raise_to_(gaps[..., tile], gap, rows)
    return gaps


def dead_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    options: ReferenceOptions | None = None,
    *,
    threshold: float = LOSSLESS,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    running: bool = False,
) -> torch.Tensor:
    """The tiles whose every score lies at least -`threshold` (log2) below its row's maximum: bool (B, Hq, Tq, Tk).

    `TileLists.of_mask(~dead)` are the lists without them. The other arguments are those of `tile_gaps`. A tile with NaN
    is not dead.
    """
    gaps = tile_gaps(q, k, options, scale=scale, is_causal=is_causal, attn_mask=attn_mask, running=running)
    return gaps <= threshold


def _raise_to_(gaps: torch.Tensor, of_rows: torch.Tensor, rows: slice) -> None:
    """Raise gaps (B, Hq, Tq) to what the query tokens `rows` have: (B, Hq, rows)."""
    blocks = slice(rows.start // TILE_TOKENS, tiles_of(rows.stop))
    behind = (blocks.stop * TILE_TOKENS) - rows.stop
    whole = torch.nn.functional.pad(of_rows, (rows.start % TILE_TOKENS, behind), value=-math.inf)
    found = whole.unflatten(2, (-1, TILE_TOKENS)).amax(dim=3)
    gaps[..., blocks] = torch.maximum(gaps[..., blocks], found)
