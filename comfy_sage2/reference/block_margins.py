"""Which blocks of 128 queries and 128 keys hold no probability worth computing."""

from __future__ import annotations

import math

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of
from .hidden_keys import hidden_keys
from .options import ReferenceOptions
from .preparation import prepare
from .scores import mask_scores_, tile_scores
from .steps import key_steps, row_tiles

LOSSLESS = -18.81
"""log2 of the largest P that E4M3 rounds to zero, rounded down.

448 P is stored. The smallest number of E4M3 is 2^-9, and 2^-10 lies half way to zero and rounds to it, the even one. So
P is lost from 448 P <= 2^-10 on: s - m <= -10 - log2(448) = -18.807, in natural units -13.04.
"""


def block_margins(
    q: torch.Tensor,
    k: torch.Tensor,
    options: ReferenceOptions | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    running: bool = False,
) -> torch.Tensor:
    """The largest s - m of each block, in units of log2: (B, Hq, Tq, Tk) float32, at most 0; -inf where all is masked.

    s are the scaled, masked scores of `reference_attention` with these arguments, and m is the maximum of the score's
    row. So 2^margin bounds what any key of the block has of its row's largest probability.

    Args:
        q, k, options, scale, is_causal, attn_mask: as for `reference_attention`.
        running: m is the maximum over the keys that the online softmax has met by the end of the score's step, which
            is what P is rounded with, and not that of the whole row. No margin is smaller then. Blocks of at most
            LOSSLESS add nothing to P V in E4M3: a call without them gives the same bits where the row sum adds P after
            its rounding (`sum_quantized_p`, as the 8-bit and 4-bit kernels do). Where it adds P before that, each key
            left out takes at most 2^LOSSLESS from a row sum of 1 or more.
    """
    options = ReferenceOptions() if options is None else options
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    shape = (q.shape[0], q.shape[1], blocks_of(q.shape[2]), blocks_of(k.shape[2]))
    margins = q.new_full(shape, -math.inf, dtype=torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        prepared = prepare(q, k, k[..., :1], options, hidden_keys(attn_mask))  # V plays no part in the scores
        for rows in row_tiles(q, options):
            maximum = margins.new_full((*shape[:2], rows.stop - rows.start), -math.inf)
            peaks = []  # (block, the rows' largest scores in a step's part of it, the maximum that P is rounded with)
            for keys in key_steps(rows, q.shape[2], k.shape[2], options, is_causal=is_causal):
                scores = tile_scores(prepared, rows, keys, scale, options.groups.block_q)
                mask_scores_(scores, attn_mask, is_causal, rows, keys)
                maximum = torch.maximum(maximum, scores.amax(dim=3))
                for block in range(keys.start // BLOCK_TOKENS, blocks_of(keys.stop)):
                    first = max(block * BLOCK_TOKENS - keys.start, 0)
                    part = scores[..., first : (block + 1) * BLOCK_TOKENS - keys.start]
                    peaks.append((block, part.amax(dim=3), maximum))
            for block, peak, met in peaks:
                shift = met if running else maximum
                # Rows that have met masked keys alone: 0 in the place of -inf keeps their margin from being NaN.
                margin = peak - shift.masked_fill(shift == -math.inf, 0.0)
                _raise_to_(margins[..., block], margin, rows)
    return margins


def _raise_to_(block_margins: torch.Tensor, of_rows: torch.Tensor, rows: slice) -> None:
    """Raise margins (B, Hq, Tq) to what the query tokens `rows` have: (B, Hq, rows)."""
    blocks = slice(rows.start // BLOCK_TOKENS, blocks_of(rows.stop))
    behind = (blocks.stop * BLOCK_TOKENS) - rows.stop
    whole = torch.nn.functional.pad(of_rows, (rows.start % BLOCK_TOKENS, behind), value=-math.inf)
    found = whole.unflatten(2, (-1, BLOCK_TOKENS)).amax(dim=3)
    block_margins[..., blocks] = torch.maximum(block_margins[..., blocks], found)
