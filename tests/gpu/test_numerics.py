"""All kernels against the reference with the same groups, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.block_mask import BlockMask

from .builds import (
    EXACT_BOUND,
    LSE_BOUND,
    REFERENCE_BOUND,
    each_product,
    exact,
    random_qkv,
    reference,
    relative_l1,
    run,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("outliers", [False, True], ids=["gaussian", "outliers"])
@pytest.mark.parametrize("smooth_v", [False, True], ids=["plain_v", "smooth_v"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@each_product
def test_agrees_with_the_reference(
    name: str, mode: str, accumulator: str, pv: str, head_dim: int, smooth_v: bool, outliers: bool
) -> None:
    q, k, v = random_qkv((1, 4, 1024, head_dim), (1, 2, 1024, head_dim), outliers=outliers)
    out, lse = run(name, q, k, v, mode=mode, smooth_v=smooth_v, pv_accumulator=accumulator, pv=pv, return_lse=True)
    wanted, wanted_lse = reference(name, q, k, v, mode=mode, smooth_v=smooth_v, pv_accumulator=accumulator, pv=pv)
    assert relative_l1(out, wanted.to(q.dtype)) <= REFERENCE_BOUND
    assert (lse - wanted_lse).abs().max() < LSE_BOUND
    # The row sum on the tensor cores drops what lies below 13 bits: up to 2^-9 of a sum of many similar numbers.
    assert (lse - wanted_lse).abs().mean() < 2**-9


@pytest.mark.parametrize("rows", ["all", "causal", "padding", "mask", "lists"])
@pytest.mark.parametrize(("mode", "head_dim"), [("8b", 24), ("8b", 64), ("8b", 128), ("8b", 256), ("4b", 128)])
def test_int8_of_tokens_of_v_that_are_unlike(mode: str, head_dim: int, rows: str) -> None:
    """Some blocks of 64 keys have a loud token, some a quiet one, some neither."""
    q, k, v = random_qkv((1, 4, 1000, head_dim), (1, 2, 1000, head_dim))
    v[:, :, 70::256] *= 100
    v[:, :, ::199] *= 0.01
    keys = torch.arange(1000, device="cuda")
    calls: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "padding": {"attn_mask": (keys < 700).view(1, 1, 1, -1)},
        "mask": {"attn_mask": torch.rand(1, 1, 1000, 1000, device="cuda") < 0.7},
        "lists": {"block_mask": BlockMask.from_dense(torch.rand(1, 4, 8, 8, device="cuda") < 0.7).lists},
    }
    call = calls.get(rows, {})
    out, lse = run("sm89", q, k, v, mode=mode, pv="int8", return_lse=True, **call)
    wanted, wanted_lse = reference("sm89", q, k, v, mode=mode, pv="int8", **call)
    assert relative_l1(out, wanted.to(q.dtype)) <= REFERENCE_BOUND
    seen = wanted_lse > -torch.inf
    assert (lse - wanted_lse)[seen].abs().max() < LSE_BOUND


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@each_product
def test_close_to_float64(name: str, mode: str, accumulator: str, pv: str, dtype: torch.dtype) -> None:
    q, k, v = random_qkv((1, 8, 2048, 128), (1, 8, 2048, 128), dtype)
    out, lse = run(name, q, k, v, mode=mode, pv_accumulator=accumulator, pv=pv, return_lse=True)
    wanted, wanted_lse = exact(q, k, v)
    assert out.dtype == dtype
    assert relative_l1(out, wanted) <= EXACT_BOUND[mode]
    assert (lse - wanted_lse).abs().mean() < (5e-3 if mode == "8b" else 3e-2)
