"""The accumulators of the tensor core, emulated (section 3.4).

The "FP32" accumulator of the FP8 product on Ada and Hopper keeps 13 mantissa bits and truncates the other ten: FP22.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_FP22_DROPPED_BITS = 10


@dataclass(frozen=True)
class Accumulator:
    """`narrow_` cuts a float32 tensor in place to the accumulator's precision, after each instruction.

    `keys_per_instruction` is the inner dimension of one tensor-core instruction; None: nothing is cut.
    """

    name: str
    keys_per_instruction: int | None
    narrow_: Callable[[torch.Tensor], torch.Tensor]

    def add_product_(self, total: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """total += p @ v in place: total (batch, M, D) float32, p (batch, M, keys), v (batch, keys, D)."""
        keys = p.shape[2]
        step = self.keys_per_instruction or keys
        for start in range(0, keys, step):
            total.baddbmm_(p[:, :, start : start + step], v[:, start : start + step])
            self.narrow_(total)
        return total


def truncate_to_fp22_(x: torch.Tensor) -> torch.Tensor:
    """Zero the ten low mantissa bits of a float32 tensor in place: truncation toward zero."""
    x.view(torch.int32).bitwise_and_(-(1 << _FP22_DROPPED_BITS))
    return x


ACCUMULATE_FP32 = Accumulator("FP32", None, lambda x: x)
ACCUMULATE_FP22 = Accumulator("FP22", 32, truncate_to_fp22_)
ACCUMULATE_FP16 = Accumulator("FP16", 32, lambda x: x.copy_(x.half()))
