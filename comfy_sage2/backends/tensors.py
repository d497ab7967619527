"""The tensors of an attention call beside q, k and v."""

from __future__ import annotations

from typing import NamedTuple

import torch


class OptionalTensors(NamedTuple):
    """What a call may have beside q, k and v; None is without.

    Attributes:
        attn_mask: 4-D (size 1 where it broadcasts), bool (True = attend) or additive float.
        tiles: the tensor of `TileLists`, of any values: entries that are not valid are left out, and nothing is read
            out of bounds.
        nonfinite: one int32 on q's device that becomes 1 when a value of the output is NaN or infinite and else stays
            as it is, without a wait for the device.
        invalid_tiles: one int32 on q's device that becomes 1 when an entry of `tiles` is not valid and else stays as it
            is, without a wait for the device.
        gaps: (B, Hq, Tq, Tk) float32, contiguous, with anything in it: it is filled with what
            `reference.dead_tiles.tile_gaps` with `running` says of the call, or more, and 0 where that is NaN.
    """

    attn_mask: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    nonfinite: torch.Tensor | None = None
    invalid_tiles: torch.Tensor | None = None
    gaps: torch.Tensor | None = None


WRITTEN = ("nonfinite", "invalid_tiles", "gaps")  # those that a call writes to
NO_TENSORS = OptionalTensors()
