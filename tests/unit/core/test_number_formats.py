"""FP8 rounding against torch's own FP8 types, and the FP22 and FP16 accumulators bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comfy_sage2.quantize.accumulators import ACCUMULATE_FP16, ACCUMULATE_FP22, ACCUMULATE_FP32, truncate_to_fp22_
from comfy_sage2.quantize.formats import BF16, E4M3, E5M2, FP16, UINT8

FORMATS = [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)]


@pytest.mark.parametrize(("number_format", "dtype"), FORMATS)
def test_every_half_precision_number_rounds_as_torch_rounds_it(number_format: Any, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = x[x.isfinite()]
    expected = x.clamp(-number_format.maximum, number_format.maximum).to(dtype).float()
    assert torch.equal(number_format.round(x), expected)


@pytest.mark.parametrize(("number_format", "dtype"), FORMATS)
def test_nan_stays_and_infinity_saturates(number_format: Any, dtype: torch.dtype) -> None:
    rounded = number_format.round(torch.tensor([math.nan, math.inf, -math.inf]))
    assert rounded[0].isnan()
    assert rounded[1:].tolist() == [number_format.maximum, -number_format.maximum]


def test_formats_of_16_bits_round_as_torch_does() -> None:
    x = torch.randn(10_000)
    assert torch.equal(FP16.round(x), x.half().float()) and torch.equal(BF16.round(x), x.bfloat16().float())


def test_uint8_rounds_small_values_to_zero() -> None:
    """A P that is nearly zero becomes zero."""
    assert UINT8.round(torch.tensor([0.0, 0.4, 0.6, 254.6, 256.0])).tolist() == [0.0, 0.0, 1.0, 255.0, 255.0]


def test_fp22_keeps_13_mantissa_bits_and_truncates_toward_zero() -> None:
    x = torch.tensor([1 + 2**-13, 1 + 2**-14, 1 + 2**-13 + 2**-14, -(1 + 2**-13 + 2**-14), 2.0**-126, 0.0])
    expected = torch.tensor([1 + 2**-13, 1.0, 1 + 2**-13, -(1 + 2**-13), 2.0**-126, 0.0])
    assert torch.equal(truncate_to_fp22_(x.clone()), expected)
    wide = torch.randn(10_000)
    cut = truncate_to_fp22_(wide.clone())
    assert (cut.abs() <= wide.abs()).all()
    assert ((wide - cut).abs() < wide.abs() * 2**-13).all()
    assert not (cut.view(torch.int32) & 0x3FF).any()


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 64, 100])
def test_accumulators_add_to_the_total(keys: int) -> None:
    p, v, total = torch.rand(3, 20, keys), torch.randn(3, keys, 8), torch.randn(3, 20, 8)
    exact = total.double() + p.double() @ v.double()
    largest_partial_sum = total.double().abs() + p.double() @ v.double().abs()
    instructions = -(-keys // 32)
    for accumulator, unit in ((ACCUMULATE_FP32, 2.0**-22), (ACCUMULATE_FP22, 2.0**-13), (ACCUMULATE_FP16, 2.0**-11)):
        out = accumulator.add_product_(total.clone(), p, v)
        assert ((out - exact).abs() <= instructions * unit * largest_partial_sum + 1e-5).all()
