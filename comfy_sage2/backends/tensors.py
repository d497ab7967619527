"""The tensors of an attention call beside q, k and v."""

from __future__ import annotations

from typing import NamedTuple

import torch


class OptionalTensors(NamedTuple):
    """What a call may have beside q, k and v; None is without.

    Attributes:
        attn_mask: 4-D (size 1 where it broadcasts), bool (True = attend) or additive float.
        block_mask: the tensor of `BlockMask`, of any values: entries that are not valid are left out, and nothing is
            read out of bounds.
        nonfinite: one int32 on q's device that becomes 1 when a value of the output is NaN or infinite and else stays
            as it is, without a wait for the device.
        invalid_blocks: one int32 on q's device that becomes 1 when an entry of `block_mask` is not valid and else stays
            as it is, without a wait for the device.
        block_margins: (B, Hq, Tq, Tk) float32, contiguous, with anything in it: it is filled with what
            `reference.block_margins.block_margins` with `running` says of the call, or more, and 0 where that is NaN.
    """

    attn_mask: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    nonfinite: torch.Tensor | None = None
    invalid_blocks: torch.Tensor | None = None
    block_margins: torch.Tensor | None = None


WRITTEN = ("nonfinite", "invalid_blocks", "block_margins")  # those that a call writes to
NO_TENSORS = OptionalTensors()
