"""Numbers of the reference whose reason stands in a comment: each where another number shows in a result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from attention_oracle import oracle, relative_l1

import comfy_sage2
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP22, ACCUMULATE_FP32
from comfy_sage2.quantize.formats import E4M3, INT4_CLIPPED
from comfy_sage2.quantize.quantizers import quantize_channels
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import PRECISE_P_MAXIMUM, ReferenceOptions

CSRC = Path(__file__).parents[3] / "csrc"


@pytest.mark.parametrize("head_dim", [40, 80, 160])
def test_rotated_scores_are_divided_by_the_size_of_the_rotation(head_dim: int) -> None:
    """A power of two, which these numbers of channels are not: divided by them the error is 0.3 and more."""
    q, k, v = (torch.randn(1, 2, 130, head_dim) for _ in range(3))
    assert relative_l1(comfy_sage2.attention(q, k, v, rotate="on"), oracle(q, k, v)[0]) < 0.06


def test_each_blocks_product_is_added_in_float32() -> None:
    """Uniform rows of many keys, all of one sign: one accumulator of 13 bits would lose a thousandth and more."""
    q, k, v = torch.zeros(1, 1, 1, 64), torch.randn(1, 1, 8192, 64), 0.5 + torch.rand(1, 1, 8192, 16)
    quantized = quantize_channels(v, E4M3)
    exact = (quantized.values.double() * quantized.scale.double()).mean(dim=2, keepdim=True)
    for options in (ReferenceOptions(), ReferenceOptions.of(AttentionOptions())):
        assert relative_l1(reference_attention(q, k, v, options)[0], exact) < 1e-4
    assert relative_l1(reference_attention(q, k, v, ReferenceOptions(two_level=False))[0], exact) > 1e-3


def test_fp16_sums_of_a_block_do_not_overflow() -> None:
    """The largest there are: 64 keys with P = 1 and V at its channel's maximum."""
    q, k, v = torch.zeros(1, 1, 3, 64), torch.randn(1, 1, 64, 64), torch.full((1, 1, 64, 64), 7.0)
    for options in (AttentionOptions(pv_accumulator="fp16"), AttentionOptions("precise", pv_accumulator="fp16")):
        out, _ = reference_attention(q, k, v, ReferenceOptions.of(options))
        torch.testing.assert_close(out, torch.full_like(out, 7.0), rtol=1e-3, atol=0.0)


def test_precise_p_has_the_kernels_scale() -> None:
    """Which write its log2, of fp16: P may grow from there while a row keeps its base."""
    shift = re.search(r"kShift = (\d+)\.f;", (CSRC / "sm90" / "precise_softmax.cuh").read_text(encoding="utf-8"))
    assert shift is not None and 2.0 ** int(shift[1]) == PRECISE_P_MAXIMUM


def test_an_instruction_of_the_fp8_product_takes_32_keys() -> None:
    """After each the sum is cut: three quarters of the last bit are lost twice, where 64 keys would keep a bit."""
    p = torch.zeros(1, 1, 64)
    p[0, 0, 0], p[0, 0, 1], p[0, 0, 32] = 1.0, 0.75 * 2.0**-13, 0.75 * 2.0**-13
    v = torch.ones(1, 64, 1)
    assert ACCUMULATE_FP22.add_product_(torch.zeros(1, 1, 1), p, v).item() == 1.0
    assert ACCUMULATE_FP32.add_product_(torch.zeros(1, 1, 1), p, v).item() == 1.0 + 1.5 * 2.0**-13


def test_clipped_int4_has_the_step_of_the_least_error_on_normal_values() -> None:
    """Mean square error of tokens of 128 channels; a smaller or larger step of the sixteen integers has more."""
    x = torch.randn(4096, 128)

    def error(maximum: float) -> float:
        step = x.abs().amax(dim=1, keepdim=True) / maximum
        return float((INT4_CLIPPED.round(x / step) * step - x).square().mean())

    assert INT4_CLIPPED.maximum is not None
    assert all(error(INT4_CLIPPED.maximum) < error(other) for other in (7.0, 8.0, 9.0, 10.0))
