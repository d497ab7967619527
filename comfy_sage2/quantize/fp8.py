"""E4M3 and E5M2 rounding for P and V (section 3.3).

P lies in [0, 1] and has the static scale 1/448 in E4M3; V has one scale a channel, amax over all tokens / 448.
"""

from __future__ import annotations

import torch

from .formats import NumberFormat

_EXPONENT_BITS = 0x7F800000  # of float32


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


E4M3 = _float_format("E4M3", 448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = _float_format("E5M2", 57344.0, mantissa_bits=2, min_exponent=-14)
