"""Low-precision number formats, emulated in float32 so that one matrix product serves all of them.

E4M3 and E5M2 are for P and V (section 3.3): P lies in [0, 1] and has the static scale 1/448 in E4M3, V has one scale a
channel, amax over all tokens / 448. INT8 and INT4 have the symmetric ranges [-127, 127] and [-7, 7] (section 2.2).
UINT8 is for P, which is never negative.

INT4_CLIPPED is for rotated Q and K, which are nearly normal: it scales a group's largest value to 8.5 and clamps to the
whole range of four bits, [-8, 7]. A finer step gains more there than the few clamped values lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_EXPONENT_BITS = 0x7F800000  # of float32


@dataclass(frozen=True)
class NumberFormat:
    """A number format as a quantizer sees it.

    maximum: what the largest magnitude of a group is scaled to; None scales nothing.
    round: float32 to the nearest representable value (ties to even) in float32, saturating, NaN kept.
    """

    name: str
    maximum: float | None
    round: Callable[[torch.Tensor], torch.Tensor]


def _float_format(name: str, maximum: float, mantissa_bits: int, min_exponent: int) -> NumberFormat:
    smallest_normal = 2.0**min_exponent
    # Adding and subtracting 1.5 * 2^(23 - mantissa_bits) * 2^exponent makes float32 itself round to the wanted bits,
    # ties to even. It is several times quicker on a CPU than a cast to torch.float8 and back.
    shift = 1.5 * 2.0 ** (23 - mantissa_bits)

    def round_to_float(x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(-maximum, maximum)
        power = x.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
        power.clamp_(min=smallest_normal).mul_(shift)
        return x.add_(power).sub_(power)

    return NumberFormat(name, maximum, round_to_float)


def _integer_format(name: str, lowest: int, highest: int, maximum: float) -> NumberFormat:
    return NumberFormat(name, maximum, lambda x: x.round().clamp_(lowest, highest))


FP16 = NumberFormat("FP16", None, lambda x: x.half().float())
BF16 = NumberFormat("BF16", None, lambda x: x.bfloat16().float())
FP32 = NumberFormat("FP32", None, lambda x: x)
E4M3 = _float_format("E4M3", 448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = _float_format("E5M2", 57344.0, mantissa_bits=2, min_exponent=-14)
INT8 = _integer_format("INT8", -127, 127, 127.0)
UINT8 = _integer_format("UINT8", 0, 255, 255.0)
INT4 = _integer_format("INT4", -7, 7, 7.0)
INT4_CLIPPED = _integer_format("INT4, clipped", -8, 7, 8.5)
