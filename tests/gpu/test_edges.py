"""Extreme numbers in the kernels: fp16's largest value, tiny V, Q or K beyond fp16, the lowest mask value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .builds import EXACT_BOUND, each_mode, each_product, exact, random_qkv, relative_l1, run

pytestmark = pytest.mark.gpu


@each_product
@pytest.mark.parametrize("smooth_v", [False, True], ids=["plain", "smooth_v"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_largest_half_precision_value_stays_finite(
    name: str, mode: str, accumulator: str, pv: str, head_dim: int, smooth_v: bool
) -> None:
    for sign in (1.0, -1.0):
        q, k, v = random_qkv((1, 4, 700, head_dim), (1, 4, 700, head_dim))
        v = torch.full_like(v, sign * 65504.0)
        v[:, 2:] *= torch.rand_like(v[:, 2:])
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        choices: dict[str, Any] = {"mode": mode, "smooth_v": smooth_v, "pv_accumulator": accumulator, "pv": pv}
        out, _ = run(name, q, k, v, nonfinite=flag, **choices)
        assert out.isfinite().all() and flag.item() == 0
        assert relative_l1(out, exact(q, k, v)[0]) < 0.05


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tiny_channels_of_v(name: str, mode: str, dtype: torch.dtype) -> None:
    """Zeros beside values whose reciprocal is close to overflow."""
    for amax in (1.0e-36, 1.2e-36, 1.3e-36, 1.32e-36, 1.4e-36, 1e-35):
        q, k, v = random_qkv((1, 2, 300, 64), (1, 2, 300, 64), dtype)
        v = (v / v.abs().amax(dim=2, keepdim=True) * amax).to(dtype)
        v[:, :, ::3] = 0
        out, _ = run(name, q, k, v, mode=mode)
        assert out.isfinite().all()
        assert (out.double() - exact(q, k, v)[0]).abs().max() < amax


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distance", [7e4, 1e6, 1e20])
@pytest.mark.parametrize("large", ["keys", "queries"])
def test_values_beyond_half_precision(name: str, mode: str, dtype: torch.dtype, distance: float, large: str) -> None:
    """Keys or queries are beyond fp16; the scores have an ordinary size."""
    q, k, v = random_qkv((1, 2, 500, 64), (1, 2, 500, 64), torch.float32)
    factor = distance if large == "keys" else 1 / distance
    q, k, v = ((q + 1) / factor).to(dtype), (k * factor).to(dtype), v.to(dtype)
    out, lse = run(name, q, k, v, mode=mode, return_lse=True)
    wanted, wanted_lse = exact(q, k, v)
    assert relative_l1(out, wanted) < 1.2 * EXACT_BOUND[mode]
    assert (lse - wanted_lse).abs().mean() < 0.2


@each_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_lse_of_rows_of_the_lowest_mask_value(name: str, mode: str, dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v = random_qkv((2, 2, 190, 64), (2, 2, 190, 64))
    mask = torch.randn(1, 1, 190, 190, device="cuda").to(dtype)
    mask[:, :, ::5] = torch.finfo(dtype).min
    mask[:, :, :, 100:] = torch.finfo(dtype).min
    out, lse = run(name, q, k, v, mode=mode, attn_mask=mask, is_causal=is_causal, return_lse=True)
    wanted, wanted_lse = exact(q, k, v, attn_mask=mask, is_causal=is_causal)
    assert relative_l1(out, wanted) < 1.2 * EXACT_BOUND[mode]
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=0.7)
