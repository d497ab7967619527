"""Which numerics the reference has for a public call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP16, ACCUMULATE_FP22, ACCUMULATE_FP32
from comfy_sage2.quantize.formats import BF16, E4M3, FP16, FP32, INT4, INT4_CLIPPED, INT8, UINT8
from comfy_sage2.quantize.groups import ADA
from comfy_sage2.reference.options import ReferenceOptions

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
    ids=["nothing", "fp8", "fp16 sums", "int8", "mxfp8", "fp16"],
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
def test_precise_keeps_v(pv: str, dtype: torch.dtype, p_format: object) -> None:
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


def test_the_defaults_are_the_papers() -> None:
    numerics = ReferenceOptions()
    assert (numerics.qk_format, numerics.groups, numerics.accumulator) == (INT8, ADA, ACCUMULATE_FP22)
    assert (numerics.smooth_q, numerics.smooth_k, numerics.smooth_v, numerics.rotate) == (False, True, False, False)
    assert numerics.two_level and not numerics.sum_quantized_p
