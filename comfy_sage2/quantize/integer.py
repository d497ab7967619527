"""INT8 and INT4: symmetric ranges [-127, 127] and [-7, 7] (section 2.2).

UINT8 is for P, which is never negative.

INT4_CLIPPED is for rotated Q and K, which are nearly normal: it scales a group's largest value to 8.5 and clamps to the
whole range of four bits, [-8, 7]. A finer step gains more there than the few clamped values lose.
"""

from __future__ import annotations

import torch

from .formats import NumberFormat


def _integer_format(name: str, lowest: int, highest: int, maximum: float) -> NumberFormat:
    def round_to_integer(x: torch.Tensor) -> torch.Tensor:
        return x.round().clamp_(lowest, highest)

    return NumberFormat(name, maximum, round_to_integer)


INT8 = _integer_format("INT8", -127, 127, 127.0)
UINT8 = _integer_format("UINT8", 0, 255, 255.0)
INT4 = _integer_format("INT4", -7, 7, 7.0)
INT4_CLIPPED = _integer_format("INT4, clipped", -8, 7, 8.5)
