"""Masks: bool and additive, 2-D to 4-D, broadcast or not, with causal, and rows that attend to nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_oracle import assert_near, oracle

import comfy_sage2

BATCH, HEADS, ROWS, KEYS = 2, 4, 150, 140
SHAPES = [
    (ROWS, KEYS),
    (1, KEYS),
    (ROWS, 1),
    (HEADS, ROWS, KEYS),
    (HEADS, 1, KEYS),
    (1, 1, ROWS, KEYS),
    (BATCH, 1, 1, KEYS),
    (BATCH, HEADS, ROWS, 1),
    (BATCH, HEADS, ROWS, KEYS),
]


def inputs() -> Any:
    q = torch.randn(BATCH, HEADS, ROWS, 32)
    k, v = (torch.randn(BATCH, 2, KEYS, 32) for _ in range(2))
    return q, k, v


def assert_matches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    expected, expected_lse = oracle(q, k, v, **options)
    out, lse = comfy_sage2.attention(q, k, v, **options, return_lse=True)
    assert_near(out, expected, "8b", 0.05)
    empty = expected_lse == -math.inf
    assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all()
    assert (lse[~empty] - expected_lse[~empty]).abs().max() < 0.1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32])
def test_masks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for is_causal in (False, True):
        mask = torch.rand(shape) > 0.4 if dtype == torch.bool else torch.randn(shape).to(dtype)
        assert_matches(*inputs(), attn_mask=mask, is_causal=is_causal)
