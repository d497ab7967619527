"""The public call on the CPU against float64: shapes, dtypes, layouts, strides, LSE, NaN, limits of number formats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_oracle import assert_near, cosine, oracle, relative_l1

import comfy_sage2

pytestmark = pytest.mark.torch_api


def inputs(
    batch: int = 1,
    q_heads: int = 2,
    kv_heads: int = 2,
    q_length: int = 130,
    kv_length: int = 130,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Any:
    q = torch.randn(batch, q_heads, q_length, head_dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_length, head_dim).to(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("head_dim", [1, 3, 8, 40, 64, 72, 96, 128, 160, 255, 256])
def test_every_head_dim(head_dim: int) -> None:
    # A few channels average too little: the mean of V in one can be near zero, and the error is relative to it.
    q, k, v = inputs(batch=1 if head_dim >= 32 else 64, head_dim=head_dim)
    assert relative_l1(comfy_sage2.attention(q, k, v), oracle(q, k, v)[0]) < 0.06
    assert cosine(comfy_sage2.attention(q, k, v, mode="4b"), oracle(q, k, v)[0]) > 0.93


@pytest.mark.parametrize(
    ("q_length", "kv_length", "is_causal"),
    [
        (1, 1, False),
        (1, 300, True),
        (300, 1, False),
        (63, 65, True),
        (128, 64, False),
        (129, 63, True),
        (500, 77, True),
        (77, 500, False),
        (77, 500, True),
    ],
)
def test_ragged_and_unequal_lengths(q_length: int, kv_length: int, is_causal: bool) -> None:
    q, k, v = inputs(batch=2, q_length=q_length, kv_length=kv_length)
    expected, expected_lse = oracle(q, k, v, is_causal=is_causal)
    out, lse = comfy_sage2.attention(q, k, v, is_causal=is_causal, return_lse=True)
    assert out.shape == q.shape
    # With one query no other rows average the error.
    assert_near(out, expected, "8b", 0.05 if q_length > 1 else 0.08)
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert (lse - expected_lse).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["8b", "4b"])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_dtypes_modes_and_smooth_v(dtype: torch.dtype, mode: str, smooth_v: bool) -> None:
    q, k, v = inputs(q_length=300, kv_length=300, dtype=dtype)
    out = comfy_sage2.attention(q, k, v, mode=mode, smooth_v=smooth_v)
    assert out.dtype == dtype
    expected = oracle(q, k, v)[0]
    assert cosine(out, expected) > (0.9985 if mode == "8b" else 0.96)
    assert_near(out, expected, mode, 0.05 if mode == "8b" else 0.25)


# With scale 1.0 two keys can hold all of a row's weight, and rounding one score moves it all: the worst of 300 draws
# had 0.24.
@pytest.mark.parametrize(("scale", "most_in_row"), [(0.02, 0.15), (0.25, 0.15), (1.0, 0.6)])
def test_scale(scale: float, most_in_row: float) -> None:
    q, k, v = inputs()
    assert_near(comfy_sage2.attention(q, k, v, scale=scale), oracle(q, k, v, scale=scale)[0], "8b", 0.08, most_in_row)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_inputs_give_nan_wherever_plain_attention_does(name: str) -> None:
    tensors = dict(zip("qkv", inputs(), strict=True))
    tensors[name][0, 1, 7, 3] = math.nan
    plain = torch.nn.functional.scaled_dot_product_attention(*tensors.values())
    for mode in ("8b", "4b"):
        out = comfy_sage2.attention(**tensors, mode=mode)
        assert out[plain.isnan()].isnan().all()
        assert not out[0, 0].isnan().any()


@pytest.mark.parametrize("mode", ["8b", "4b", "precise", "exact"])
def test_autocast_changes_nothing(mode: str) -> None:
    q, k, v = (torch.randn(1, 2, 300, 64) for _ in range(3))
    expected = comfy_sage2.attention(q, k, v, mode=mode, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(comfy_sage2.attention(q, k, v, mode=mode, backend="reference"), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_one_nonfinite_value_sets_the_flag_and_no_call_clears_it(layout: str, value: float) -> None:
    q, k, v = (torch.randn(1, 20, 2, 16).half() for _ in range(3))
    flag = torch.zeros((), dtype=torch.int32)
    plain = comfy_sage2.attention(q, k, v, layout=layout)
    assert torch.equal(comfy_sage2.attention(q, k, v, layout=layout, nonfinite=flag), plain)
    assert flag.item() == 0
    broken = v.clone()
    broken[0, 3, 1, 5] = value
    comfy_sage2.attention(q, k, broken, layout=layout, nonfinite=flag)
    assert flag.item() == 1
    comfy_sage2.attention(q, k, v, layout=layout, nonfinite=flag)
    assert flag.item() == 1


MODES = ("8b", "4b")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("smooth_v", [False, True])
@pytest.mark.parametrize("pv_accumulator", ["fp32", "fp16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_half_precision_value_stays_finite(
    mode: str, smooth_v: bool, pv_accumulator: str, sign: float
) -> None:
    q, k = (torch.randn(2, 4, 150, 64).half() for _ in range(2))
    v = torch.full_like(k, sign * 65504.0)
    flag = torch.zeros(1, dtype=torch.int32)
    out = comfy_sage2.attention(q, k, v, mode=mode, smooth_v=smooth_v, pv_accumulator=pv_accumulator, nonfinite=flag)
    assert out.isfinite().all() and flag.item() == 0
    assert relative_l1(out, v) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amax", [1.0e-36, 1.1e-36, 1.3e-36, 1.32e-36, 1e-35, 3e-37])
@pytest.mark.parametrize("mode", MODES)
def test_tiny_channels_of_v(mode: str, amax: float, dtype: torch.dtype) -> None:
    q, k = (torch.randn(1, 2, 150, 32).to(dtype) for _ in range(2))
    v = torch.randn(1, 2, 150, 32)
    v = (v / v.abs().amax(dim=2, keepdim=True) * amax).to(dtype)
    v[:, :, ::3] = 0
    out = comfy_sage2.attention(q, k, v, mode=mode)
    expected, _ = oracle(q, k, v)
    assert relative_l1(out, expected) < (0.06 if mode == "8b" else 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [7e4, 1e6])
def test_keys_far_from_their_mean(dtype: torch.dtype, distance: float) -> None:
    """|K - mean| beyond the range of half precision, with scores of an ordinary size."""
    q = torch.randn(1, 2, 150, 32) / distance
    k, v = torch.randn(1, 2, 150, 32) * distance, torch.randn(1, 2, 150, 32)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    assert (k.float() - k.float().mean(2, keepdim=True)).abs().max() > 65504
    out, lse = comfy_sage2.attention(q, k, v, mode="4b", return_lse=True)
    expected, expected_lse = oracle(q, k, v)
    assert relative_l1(out, expected) < 0.25
    assert (lse - expected_lse).abs().mean() < 0.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_lse_of_rows_of_the_lowest_mask_value(mode: str, dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 2, 90, 32) for _ in range(3))
    mask = torch.randn(90, 90).to(dtype)
    mask[::5] = torch.finfo(dtype).min
    mask[:, 40:] = torch.finfo(dtype).min
    out, lse = comfy_sage2.attention(q, k, v, mode=mode, attn_mask=mask, is_causal=is_causal, return_lse=True)
    expected, expected_lse = oracle(q, k, v, attn_mask=mask, is_causal=is_causal)
    assert relative_l1(out, expected) < (0.06 if mode == "8b" else 0.3)
    # float16's lowest value does not absorb the scores, so that the LSE has their error, too.
    # The bound is on the largest of some hundred errors: with 4b it is 0.5 in one draw of thirty.
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0.7 if mode == "8b" else 1.3)
