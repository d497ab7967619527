"""What a low-precision number format is to a quantizer: the largest magnitude it is scaled to, and its rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NumberFormat:
    """A format whose values are held in float32 tensors, so that one matrix product serves all formats.

    `maximum` is the magnitude that the largest element of a group is scaled to; None means elements are not scaled.
    `round` maps float32 to the nearest representable value (ties to even) in float32, saturating, NaN kept.
    """

    name: str
    maximum: float | None
    round: Callable[[torch.Tensor], torch.Tensor]


FP16 = NumberFormat("FP16", None, lambda x: x.half().float())
BF16 = NumberFormat("BF16", None, lambda x: x.bfloat16().float())
FP32 = NumberFormat("FP32", None, lambda x: x)
