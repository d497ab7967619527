"""The numerics of the reference for a public call, and constants that comments justify."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import oracle, relative_l1

import comfy_sage2
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP16, ACCUMULATE_FP22, ACCUMULATE_FP32
from comfy_sage2.quantize.formats import BF16, E4M3, FP16, FP32, INT4, INT4_CLIPPED, INT8, UINT8
from comfy_sage2.quantize.groups import ADA
from comfy_sage2.quantize.quantizers import quantize_channels
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import PRECISE_P_MAXIMUM, ReferenceOptions

IN_FP8 = {
    "p_format": E4M3, "v_format": E4M3, "p_maximum": None, "v_maximum": None, "accumulator": ACCUMULATE_FP22,
    "sum_quantized_p": True, "p_of_step": False, "v_powers_of_two": False,
}  # fmt: skip
IN_FP16 = {**IN_FP8, "p_format": FP16, "v_format": FP16, "p_maximum": 448.0, "sum_quantized_p": False}
IN_16_BITS = {**IN_FP16, "v_format": FP32, "p_maximum": 64.0, "accumulator": ACCUMULATE_FP32}


@pytest.mark.parametrize("mode", ["8b", "4b"])
@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        ({}, IN_FP8),
        ({"pv": "fp8"}, IN_FP8),
        ({"pv_accumulator": "fp16"}, {**IN_FP8, "accumulator": ACCUMULATE_FP16, "v_maximum": 2.25}),
        (
            {"pv": "int8"},
            {**IN_FP8, "p_format": UINT8, "v_format": INT8, "p_of_step": True, "accumulator": ACCUMULATE_FP32},
        ),
        ({"pv": "mxfp8"}, {**IN_FP8, "accumulator": ACCUMULATE_FP32}),
        ({"pv": "fp16"}, {**IN_FP16, "accumulator": ACCUMULATE_FP32}),
    ],
    ids=["defaults", "fp8", "fp16 sums", "int8", "mxfp8", "fp16"],
)
def test_products_of_p_and_v(mode: str, chosen: dict[str, str], wanted: dict[str, Any]) -> None:
    numerics = ReferenceOptions.of(AttentionOptions(mode, **chosen))  # type: ignore[arg-type]
    assert {name: getattr(numerics, name) for name in wanted} == wanted
    assert (numerics.qk_format, numerics.smooth_q) == ((INT8, False) if mode == "8b" else (INT4, True))


@pytest.mark.parametrize(("mode", "pv"), [("8b", "fp16"), ("4b", "fp16"), ("precise", "auto"), ("precise", "fp16")])
def test_fp16_sums_of_fp16_products(mode: str, pv: str) -> None:
    numerics = ReferenceOptions.of(AttentionOptions(mode, pv=pv, pv_accumulator="fp16"))
    wanted = {**IN_FP16, "v_maximum": 2.25, "v_powers_of_two": mode == "precise"}
    del wanted["accumulator"]
    assert {name: getattr(numerics, name) for name in wanted} == wanted
    assert numerics.accumulator.keys_per_instruction == 16 and numerics.accumulator != ACCUMULATE_FP32


@pytest.mark.parametrize("pv", ["auto", "fp16"])
@pytest.mark.parametrize(
    ("dtype", "p_format"),
    [(torch.float16, FP16), (torch.bfloat16, BF16), (torch.float32, FP32)],
    ids=["fp16", "bf16", "fp32"],
)
def test_precise_does_not_quantize_v(pv: str, dtype: torch.dtype, p_format: object) -> None:
    options = AttentionOptions("precise", pv=pv, pv_accumulator="fp32", smooth_v=True)
    numerics = ReferenceOptions.of(options, dtype=dtype)
    wanted = {**IN_16_BITS, "p_format": p_format, "smooth_v": False, "qk_format": INT8, "smooth_q": False}
    assert {name: getattr(numerics, name) for name in wanted} == wanted


@pytest.mark.parametrize("mode", ["8b", "4b", "precise"])
@pytest.mark.parametrize(("rotate", "rotates"), [("off", False), ("on", True), ("auto", None)])
def test_rotation_of_all_heads_and_of_one(mode: str, rotate: str, rotates: bool | None) -> None:
    numerics = ReferenceOptions.of(AttentionOptions(mode, rotate=rotate), groups=ADA)
    assert numerics.rotate is rotates and numerics.smooth_k and numerics.groups == ADA != replace(ADA, q="token")
    plain, rotated = numerics.of_heads(rotated=False), numerics.of_heads(rotated=True)
    assert plain.rotate is False and rotated.rotate is True
    assert (plain.qk_format, plain.groups) == (numerics.qk_format, ADA)
    if mode == "4b":
        assert rotated.qk_format == INT4_CLIPPED and rotated.groups.q == "token"
        assert rotated.groups.k == ADA.k
    else:
        assert (rotated.qk_format, rotated.groups) == (INT8, ADA)


CSRC = Path(__file__).parents[3] / "csrc"


@pytest.mark.parametrize("head_dim", [40, 80, 160])
def test_rotated_scores_are_divided_by_the_size_of_the_rotation(head_dim: int) -> None:
    """That size is a power of two, unlike these head_dims: dividing by the head_dim gives an error of 0.3 and more."""
    q, k, v = (torch.randn(1, 2, 130, head_dim) for _ in range(3))
    assert relative_l1(comfy_sage2.attention(q, k, v, rotate="on"), oracle(q, k, v)[0]) < 0.06


def test_each_blocks_product_is_added_in_float32() -> None:
    """With uniform rows over many keys of one sign, a single 13-bit accumulator would lose a thousandth and more."""
    q, k, v = torch.zeros(1, 1, 1, 64), torch.randn(1, 1, 8192, 64), 0.5 + torch.rand(1, 1, 8192, 16)
    quantized = quantize_channels(v, E4M3)
    exact = (quantized.values.double() * quantized.scale.double()).mean(dim=2, keepdim=True)
    for options in (ReferenceOptions(), ReferenceOptions.of(AttentionOptions())):
        assert relative_l1(reference_attention(q, k, v, options)[0], exact) < 1e-4
    assert relative_l1(reference_attention(q, k, v, ReferenceOptions(two_level=False))[0], exact) > 1e-3


def test_fp16_sums_of_a_block_do_not_overflow() -> None:
    """These are the largest sums: 64 keys with P = 1 and V at its channel's maximum."""
    q, k, v = torch.zeros(1, 1, 3, 64), torch.randn(1, 1, 64, 64), torch.full((1, 1, 64, 64), 7.0)
    for options in (AttentionOptions(pv_accumulator="fp16"), AttentionOptions("precise", pv_accumulator="fp16")):
        out, _ = reference_attention(q, k, v, ReferenceOptions.of(options))
        torch.testing.assert_close(out, torch.full_like(out, 7.0), rtol=1e-3, atol=0.0)


def test_precise_p_has_the_kernels_scale() -> None:
    """The kernels hold its log2 for FP16: P may grow from there while a row keeps its base."""
    shift = re.search(r"kShift = (\d+)\.f;", (CSRC / "sm90" / "precise_softmax.cuh").read_text(encoding="utf-8"))
    assert shift is not None and 2.0 ** int(shift[1]) == PRECISE_P_MAXIMUM


def test_an_instruction_of_the_fp8_product_takes_32_keys() -> None:
    """Each instruction truncates the sum: three quarters of the last bit are lost twice; 64 keys would keep a bit."""
    p = torch.zeros(1, 1, 64)
    p[0, 0, 0], p[0, 0, 1], p[0, 0, 32] = 1.0, 0.75 * 2.0**-13, 0.75 * 2.0**-13
    v = torch.ones(1, 64, 1)
    assert ACCUMULATE_FP22.add_product_(torch.zeros(1, 1, 1), p, v).item() == 1.0
    assert ACCUMULATE_FP32.add_product_(torch.zeros(1, 1, 1), p, v).item() == 1.0 + 1.5 * 2.0**-13


def test_clipped_int4_has_the_step_of_the_least_error_on_normal_values() -> None:
    """Tokens have 128 channels; a smaller or larger step of the sixteen integers has a larger mean square error."""
    x = torch.randn(4096, 128)

    def error(maximum: float) -> float:
        step = x.abs().amax(dim=1, keepdim=True) / maximum
        return float((INT4_CLIPPED.round(x / step) * step - x).square().mean())

    assert INT4_CLIPPED.maximum is not None
    assert all(error(INT4_CLIPPED.maximum) < error(other) for other in (7.0, 8.0, 9.0, 10.0))
