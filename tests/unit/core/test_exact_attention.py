"""The exact attention that all errors are measured against computes in parts; it is compared with the definition."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import oracle

from comfy_sage2.reference import exact
from comfy_sage2.reference.exact import exact_attention

pytestmark = pytest.mark.usefixtures("fresh_seed")

BLOCK = 128
# (batch, heads of q, heads of k, queries, keys). LARGE has several parts of the usual size, the others of SMALL_PART.
LARGE = (1, 2, 2, 1500, 1500)
SIZES = [(1, 2, 2, 150, 150), (2, 4, 2, 70, 90), (1, 6, 1, 100, 300), (1, 3, 3, 210, 205), (2, 4, 2, 1, 90)]
SMALL_PART = 1 << 13  # scores
MASKS = ("none", "rows", "closed rows", "keys", "heads", "bias", "bias of keys")


def inputs(size: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, kv_heads, queries, keys = size
    q = torch.randn(batch, heads, queries, 8, dtype=dtype)
    # Each head of k and v, and each token, has values of its own.
    k, v = (torch.randn(batch, kv_heads, keys, 8, dtype=dtype) for _ in range(2))
    return q, k, v + torch.arange(kv_heads)[:, None, None]


def masked(kind: str, size: tuple[int, ...]) -> torch.Tensor | None:
    batch, heads, _, queries, keys = size
    shapes = {
        "rows": (1, 1, queries, keys), "closed rows": (batch, 1, queries, keys), "keys": (batch, 1, 1, keys),
        "heads": (1, heads, queries, keys), "bias": (batch, 1, queries, keys), "bias of keys": (1, heads, 1, keys),
    }  # fmt: skip
    if kind == "none":
        return None
    if kind.startswith("bias"):
        return torch.randn(shapes[kind])
    mask = torch.rand(shapes[kind]) < 0.4
    mask[..., 0] = True
    if kind == "closed rows":
        mask[:, :, :: max(queries // 5, 2)] = False
    return mask


def check(size: tuple[int, ...], is_causal: bool, mask: str) -> None:
    q, k, v = inputs(size, torch.float32)
    given = masked(mask, size)
    scale = None if mask == "none" else 0.3
    expected, expected_lse = oracle(q, k, v, attn_mask=given, is_causal=is_causal, scale=scale)
    out, lse = exact_attention(q, k, v, scale=scale, is_causal=is_causal, attn_mask=given)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_calls_of_one_part_and_of_several(
    size: tuple[int, ...], is_causal: bool, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(size, is_causal, mask)
    monkeypatch.setattr(exact, "_TILE_SCORES", SMALL_PART)
    check(size, is_causal, mask)


@pytest.mark.parametrize(("is_causal", "mask"), [(True, "none"), (False, "rows")])
def test_more_scores_than_fit_into_one_part(is_causal: bool, mask: str) -> None:
    check(LARGE, is_causal, mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_block_masks_of_calls_in_several_parts(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_TILE_SCORES", 1 << 16)
    q, k, v = inputs((1, 2, 1, 400, 500), torch.float32)
    active = torch.rand(1, 2, math.ceil(400 / BLOCK), math.ceil(500 / BLOCK)) < 0.5
    active[..., 0] = True
    dense = active.repeat_interleave(BLOCK, 2)[:, :, :400].repeat_interleave(BLOCK, 3)[..., :500]
    expected, expected_lse = oracle(q, k, v, attn_mask=dense, is_causal=is_causal)
    out, lse = exact_attention(q, k, v, is_causal=is_causal, active_blocks=active)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_inputs_of_16_bits_are_not_rounded_further(dtype: torch.dtype, autocast: bool) -> None:
    q, k, v = inputs((1, 2, 1, 300, 400), dtype)
    expected, expected_lse = oracle(q, k, v, is_causal=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, lse = exact_attention(q, k, v, is_causal=True)
        single, _ = exact_attention(q, k, v, is_causal=True, dtype=torch.float32)
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lowest", [-1e30, torch.finfo(torch.float32).min])
def test_a_row_with_only_very_low_mask_values_is_the_mean(dtype: torch.dtype, lowest: float) -> None:
    q, k, v = inputs((1, 2, 1, 5, 90), torch.float32)
    mask = torch.zeros(5, 90)
    mask[3] = lowest
    expected, _ = oracle(q, k, v, attn_mask=mask)
    out, _ = exact_attention(q, k, v, attn_mask=mask, dtype=dtype)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
