"""Keys that a mask hides from all queries and heads leave no trace, as if they had been cut off."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_oracle import oracle, relative_l1

import comfy_sage2

SHOWN, KEYS = 200, 330
MODES = ["8b", "4b", "precise"]
each_mode = pytest.mark.parametrize("mode", MODES)


def padding(dtype: torch.dtype, lowest: bool = False) -> torch.Tensor:
    attends = torch.arange(KEYS) < SHOWN
    attends[::7] = False  # hide some of the shown ones, too
    if dtype == torch.bool:
        return attends.view(1, 1, 1, -1)
    hiding = torch.finfo(dtype).min if lowest else -math.inf
    return torch.zeros(KEYS, dtype=dtype).masked_fill(~attends, hiding).view(1, 1, 1, -1)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(2, 4, 150, 64), torch.randn(2, 2, KEYS, 64) + 1.0, torch.randn(2, 2, KEYS, 64) + 2.0
    return q, k, v


@each_mode
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lowest", [False, True])
def test_the_error_is_that_of_a_call_without_hidden_keys(mode: str, dtype: torch.dtype, lowest: bool) -> None:
    q, k, v = inputs()
    mask = padding(dtype, lowest)
    attends = padding(torch.bool).flatten()
    k[:, :, ~attends] *= 10.0
    v[:, :, ~attends] *= 10.0
    cut = (k[:, :, attends], v[:, :, attends])
    expected, expected_lse = oracle(q, *cut)
    error = relative_l1(comfy_sage2.attention(q, k, v, mode=mode, attn_mask=mask), expected)
    alone, lse = comfy_sage2.attention(q, *cut, mode=mode, return_lse=True)
    assert error == pytest.approx(relative_l1(alone, expected), rel=0.25)  # other keys share scales
    assert (lse - expected_lse).abs().max() < 0.5


def rows_of(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask with a row for each query or head, and the keys (2, 4, KEYS) that it hides from all queries of a head."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(2, 4, 1, KEYS, generator=generator) < 0.5
    rows = torch.rand(2, 4, 150, KEYS, generator=generator) < 0.5
    if kind == "query":  # the same for all heads and batch entries
        hidden, rows = hidden[:1, :1].expand(2, 4, -1, -1), rows[:1, :1]
    elif kind == "head":
        rows = torch.ones(2, 4, 1, 1, dtype=torch.bool)
    elif kind == "padding":
        hidden, rows = hidden[:, :1].expand(-1, 4, -1, -1), torch.ones(2, 1, 1, 1, dtype=torch.bool)
    return rows & ~hidden[: rows.shape[0], : rows.shape[1]], hidden[:, :, 0]


@each_mode
@pytest.mark.parametrize("kind", ["query", "head", "query and head", "padding"])
@pytest.mark.parametrize("form", [torch.bool, torch.float32, "lowest"], ids=str)
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_keys_that_a_mask_hides_from_all_leave_no_trace(
    fresh_seed: int, mode: str, kind: str, form: Any, layout: str, smooth_v: bool
) -> None:
    q, k, v = inputs()
    attends, hidden = rows_of(kind, fresh_seed)
    hidden = hidden.unflatten(1, (2, 2)).all(dim=2)[..., None]  # from both query heads of a head of k
    mask = attends
    if form != torch.bool:
        hiding = torch.finfo(torch.float32).min if form == "lowest" else -math.inf
        mask = torch.zeros(attends.shape).masked_fill(~attends, hiding)
    choices: dict[str, Any] = {"mode": mode, "smooth_v": smooth_v, "layout": layout}

    def run(content: float) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn_like(k) * content
        filled = [q, torch.where(hidden, noise, k), torch.where(hidden, noise, v)]
        if layout == "BNHD":
            filled = [tensor.transpose(1, 2) for tensor in filled]
        out, lse = comfy_sage2.attention(*filled, attn_mask=mask, return_lse=True, **choices)
        return (out if layout == "BHND" else out.transpose(1, 2)), lse

    wanted = run(0.0)
    expected, expected_lse = oracle(q, k, v, attn_mask=attends)
    assert relative_l1(wanted[0], expected) < (0.3 if mode == "4b" else 0.08)
    assert (wanted[1] - expected_lse).abs().max() < 0.5
    for content in (30.0, 1e4, math.inf, math.nan):
        out, lse = run(content)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


def test_a_mask_of_rows_that_changed_is_read_again() -> None:
    q, k, v = inputs()
    mask = torch.ones(150, KEYS, dtype=torch.bool)
    comfy_sage2.attention(q, k, v, attn_mask=mask)
    mask[:, 100:] = False
    loud = torch.cat([k[:, :, :100], k[:, :, 100:] * 1e4], dim=2)
    wanted = comfy_sage2.attention(q, k, v, attn_mask=mask)
    assert torch.equal(comfy_sage2.attention(q, loud, v, attn_mask=mask), wanted)
    mask[:, 100:] = True
    expected, _ = oracle(q, k, v)
    assert relative_l1(comfy_sage2.attention(q, k, v, attn_mask=mask), expected) < 0.08


def test_a_mask_of_rows_hides_other_keys_from_causal_calls() -> None:
    q, k, v = inputs()
    mask = torch.ones(150, KEYS, dtype=torch.bool)
    comfy_sage2.attention(q, k, v, attn_mask=mask)  # the mask hides no key of this call
    loud = [torch.cat([tensor[:, :, :150], tensor[:, :, 150:] * 1e4], dim=2) for tensor in (k, v)]
    wanted = comfy_sage2.attention(q, k, v, attn_mask=mask, is_causal=True)
    assert torch.equal(comfy_sage2.attention(q, *loud, attn_mask=mask, is_causal=True), wanted)


def test_a_mask_hides_other_keys_from_calls_with_fewer_queries() -> None:
    """A causal call with as many queries as keys finds that the mask hides none; that result does not hold here."""
    q, k, v = inputs()
    k, v, few = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], q[:, :, :50]
    mask = torch.ones(1, q.shape[1], 1, q.shape[2], dtype=torch.bool)
    broken = [torch.cat([tensor[:, :, :50], tensor[:, :, 50:] * torch.nan], dim=2) for tensor in (k, v)]
    wanted = comfy_sage2.attention(few, *broken, attn_mask=mask.clone(), is_causal=True)
    comfy_sage2.attention(q, k, v, attn_mask=mask, is_causal=True)
    assert torch.equal(comfy_sage2.attention(few, *broken, attn_mask=mask, is_causal=True), wanted)
    assert wanted.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_with_only_the_lowest_value_attends_to_keys_hidden_from_other_rows(is_causal: bool) -> None:
    q, k, v = inputs()
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(150, KEYS)
    mask[:, :50] = lowest
    if not is_causal:  # in causal calls the first 50 rows see only such keys
        mask[7] = lowest
    v[:, :, :50] += 5.0
    expected, _ = oracle(q, k, v, attn_mask=mask, is_causal=is_causal)
    out = comfy_sage2.attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    assert relative_l1(out[:, :, :50], expected[:, :, :50]) < 0.1


@each_mode
def test_masks_that_hide_every_key(mode: str) -> None:
    """A row with only the lowest value is uniform; a row with only False is empty."""
    q, k, v = inputs()
    lowest = torch.full((1, 1, 1, KEYS), torch.finfo(torch.float32).min)
    mean = v.mean(dim=2, keepdim=True).repeat_interleave(2, 1).expand(q.shape)
    assert relative_l1(comfy_sage2.attention(q, k, v, mode=mode, attn_mask=lowest), mean) < 0.05
    nothing = torch.zeros(2, 1, 1, KEYS, dtype=torch.bool)
    nothing[1] = True
    out = comfy_sage2.attention(q, k, v, mode=mode, attn_mask=nothing)
    assert not out[0].any()
    unmasked = comfy_sage2.attention(q, k, v, mode=mode)  # smoothing subtracts a sample's mean from its K
    assert relative_l1(out[1], unmasked[1]) < 0.02


@each_mode
@pytest.mark.parametrize("rotate", ["off", "auto"])
@pytest.mark.parametrize("mask", [torch.ones(1, 1, dtype=torch.bool), torch.full((2, 1, 1, 1), -3.0)], ids=["2d", "4d"])
def test_a_constant_mask_changes_nothing(mode: str, rotate: str, mask: torch.Tensor) -> None:
    q, k, v = inputs()
    choices: dict[str, Any] = {"mode": mode, "rotate": rotate, "smooth_v": True}
    wanted = comfy_sage2.attention(q, k, v, **choices)
    masked = comfy_sage2.attention(q, k, v, **choices, attn_mask=mask)
    assert (masked - wanted).norm() < 0.02 * wanted.norm()
