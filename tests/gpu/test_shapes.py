"""Shapes, layouts and masks of all kernels, against float64 and the reference on fresh random inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .builds import EXACT_BOUND, check, each_mode, exact, random_qkv, relative_l1, run, views_with_nan_between

pytestmark = pytest.mark.gpu

each_rotation = pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])


@each_mode
@each_rotation
def test_every_head_dim(name: str, mode: str, rotate: bool) -> None:
    """A head_dim that no kernel takes is padded."""
    for head_dim in (1, 5, 60, 77, *range(8, 257, 8)):
        check(name, *random_qkv((1, 2, 200, head_dim), (1, 2, 333, head_dim)), mode, rotate=rotate)


@each_mode
@each_rotation
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_ragged_and_unequal_lengths(name: str, mode: str, rotate: bool, is_causal: bool) -> None:
    lengths = (1, 2, 7, 63, 64, 65, 127, 129, 191, 193, 300, 385)
    for index, q_length in enumerate(lengths):
        for kv_length in (lengths[index], lengths[-1 - index], 1):
            for head_dim in (64, 128):
                inputs = random_qkv((2, 4, q_length, head_dim), (2, 2, kv_length, head_dim))
                check(name, *inputs, mode, rotate=rotate, is_causal=is_causal)


@each_mode
@each_rotation
def test_causal_with_grouped_heads(name: str, mode: str, rotate: bool) -> None:
    for head_dim in (64, 96, 128, 256):
        inputs = random_qkv((2, 6, 700, head_dim), (2, 2, 700, head_dim), torch.bfloat16, outliers=rotate)
        check(name, *inputs, mode, rotate=rotate, smooth_v=rotate, is_causal=True)


@each_mode
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 300, 100), (1, 101, 1100), (2, 500, 130)], ids=str)
def test_causal_calls_of_many_heads(name: str, mode: str, head_dim: int, shape: tuple[int, int, int]) -> None:
    """Hopper's kernels take the heads in groups. Each group begins with a new round of all multiprocessors."""
    batch, heads, length = shape
    check(name, *random_qkv((batch, heads, length, head_dim), (batch, heads, length, head_dim)), mode, is_causal=True)


def fused_qkv(form: str, head_dim: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A fused projection of 2 batches, 333 tokens and 4 heads, and its q, k and v as BHND views."""
    if form == "3HD":
        fused = torch.randn(2, 333, 3, 4, head_dim, device="cuda", dtype=torch.float16)
        return fused, fused.permute(2, 0, 3, 1, 4).unbind(0)
    fused = torch.randn(2, 333, 4, 3, head_dim, device="cuda", dtype=torch.float16)
    return fused, fused.permute(3, 0, 2, 1, 4).unbind(0)


def check_fused_qkv(name: str, mode: str, head_dim: int, form: str, **options: Any) -> None:
    """With a fused projection in both layouts, the output is near exact attention, and the inputs do not change."""
    fused, (q, k, v) = fused_qkv(form, head_dim)
    before = fused.clone()
    wanted, _ = exact(q, k, v)
    for layout, order in (("BHND", (0, 1, 2, 3)), ("BNHD", (0, 2, 1, 3))):
        out, _ = run(name, *(tensor.permute(order) for tensor in (q, k, v)), mode=mode, layout=layout, **options)
        assert out.is_contiguous()
        assert relative_l1(out.permute(order), wanted) <= EXACT_BOUND[mode]
    assert torch.equal(fused, before)


@each_mode
@each_rotation
@pytest.mark.parametrize("form", ["3HD", "H3D"])
def test_fused_qkv_in_either_layout(name: str, mode: str, rotate: bool, form: str) -> None:
    for head_dim in (64, 72, 128, 256):
        check_fused_qkv(name, mode, head_dim, form, rotate=rotate, smooth_v=not rotate)


@each_mode
@each_rotation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("channels", [8, 40, 72, 120, 136, 248])
def test_views_whose_channels_fill_no_whole_vectors(
    name: str, mode: str, rotate: bool, dtype: torch.dtype, channels: int, fresh_seed: int
) -> None:
    """In views of one tensor, which has NaN between tokens, heads and channels."""
    q, k, v = views_with_nan_between(channels, dtype)
    k += 3.0
    mask = torch.zeros(2, 1, 1, 300, device="cuda", dtype=dtype)
    mask[1, ..., 200:] = -torch.inf
    check(name, q, k, v, mode, smooth_v=True, rotate=rotate, attn_mask=mask)


@each_mode
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_work_than_multiprocessors(name: str, mode: str, head_dim: int, is_causal: bool) -> None:
    """Persistent thread blocks take several query blocks each, in one or in many steps over the keys."""
    for heads, length in ((16, 1500), (200, 100)):
        shape = (2, heads, length, head_dim)
        check(name, *random_qkv(shape, shape), mode, is_causal=is_causal)


@each_mode
def test_more_heads_than_a_grid_has_rows(name: str, mode: str) -> None:
    """Temporal attention has a batch of all pixels: more than the 65535 blocks of a grid's second or third axis."""
    q, k, v = random_qkv((70_000, 1, 8, 64), (70_000, 1, 8, 64))
    out, _ = run(name, q, k, v, mode=mode)
    assert relative_l1(out, exact(q, k, v)[0]) <= EXACT_BOUND[mode]


def masks(batch: int, heads: int, q_length: int, kv_length: int) -> dict[str, torch.Tensor]:
    def attend(*shape: int) -> torch.Tensor:
        mask = torch.rand(shape, device="cuda") < 0.7
        mask[..., 0] = True
        return mask

    padding = torch.ones(batch, 1, 1, kv_length, dtype=torch.bool, device="cuda")
    padding[0, ..., kv_length // 3 :] = False
    empty_rows = attend(1, 1, q_length, kv_length)
    empty_rows[:, :, 5:9] = False
    return {
        "key padding": padding,
        "keys of each head": attend(1, heads, 1, kv_length),
        "queries": attend(1, 1, q_length, kv_length),
        "everything": attend(batch, heads, q_length, kv_length),
        "empty rows": empty_rows,
        "one for all keys": torch.randn(1, 1, q_length, 1, device="cuda"),
        "additive keys": torch.randn(batch, 1, 1, kv_length, device="cuda", dtype=torch.float16),
        "additive keys of each head": torch.randn(1, heads, 1, kv_length, device="cuda"),
        "additive": torch.randn(1, heads, q_length, kv_length, device="cuda", dtype=torch.bfloat16),
        "additive with -inf": torch.randn(1, 1, q_length, kv_length, device="cuda").masked_fill(
            ~attend(1, 1, q_length, kv_length), -torch.inf
        ),
        "sliced": attend(1, 1, q_length, 2 * kv_length)[..., ::2],
    }


@each_mode
@each_rotation
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_masks(name: str, mode: str, rotate: bool, is_causal: bool) -> None:
    for head_dim in (64, 128, 256):
        q, k, v = random_qkv((2, 4, 190, head_dim), (2, 2, 210, head_dim))
        for mask in masks(2, 4, 190, 210).values():
            check(name, q, k, v, mode, rotate=rotate, attn_mask=mask, is_causal=is_causal)


def mostly_open_masks(batch: int, kv_length: int) -> dict[str, torch.Tensor]:
    """Masks that are the same for all queries and do not change most blocks of keys."""
    padding = torch.ones(batch, 1, 1, kv_length, dtype=torch.bool, device="cuda")
    padding[0, ..., kv_length * 2 // 3 :] = False
    one_key = torch.ones(1, 1, 1, kv_length, dtype=torch.bool, device="cuda")
    one_key[..., kv_length // 2] = False
    few_keys = torch.zeros(batch, 1, 1, kv_length, dtype=torch.bfloat16, device="cuda")
    few_keys[-1, ..., kv_length // 3 : kv_length // 3 + 10] = torch.randn(10, device="cuda")
    return {
        "padding": padding,
        "one key": one_key,
        "few keys": few_keys,
        "padding by the lowest number": (~padding).float() * torch.finfo(torch.float32).min,
        "open": torch.ones(1, 1, 1, kv_length, dtype=torch.bool, device="cuda"),
    }


@each_mode
@each_rotation
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_masks_that_leave_blocks_open(name: str, mode: str, rotate: bool, is_causal: bool) -> None:
    for head_dim in (64, 128, 256):
        for kv_length in (1000, 1150):  # at head_dim 64 Hopper takes 128 or 192 keys per step
            q, k, v = random_qkv((2, 4, 333, head_dim), (2, 2, kv_length, head_dim))
            for mask in mostly_open_masks(2, kv_length).values():
                check(name, q, k, v, mode, rotate=rotate, attn_mask=mask, is_causal=is_causal)


@each_mode
def test_mask_that_hides_every_key(name: str, mode: str) -> None:
    for head_dim in (64, 128, 256):
        for kv_length in (500, 576):
            q, k, v = random_qkv((1, 2, 150, head_dim), (1, 2, kv_length, head_dim))
            mask = torch.zeros(1, 1, 1, kv_length, dtype=torch.bool, device="cuda")
            flag = torch.zeros(1, dtype=torch.int32, device="cuda")
            out, lse = run(name, q, k, v, mode=mode, attn_mask=mask, return_lse=True, nonfinite=flag)
            assert torch.equal(out, torch.zeros_like(out))
            assert torch.equal(lse, torch.full_like(lse, -torch.inf)) and not flag.item()


@each_mode
def test_scale_is_used(name: str, mode: str) -> None:
    check(name, *random_qkv((1, 2, 200, 64), (1, 2, 200, 64)), mode, scale=0.02)


@each_mode
@each_rotation
def test_nan_reaches_the_output(name: str, mode: str, rotate: bool) -> None:
    for tensor in range(3):
        inputs = random_qkv((1, 1, 200, 64), (1, 1, 200, 64))
        inputs[tensor][0, 0, 150, 3] = torch.nan
        out, _ = run(name, *inputs, mode=mode, rotate=rotate)
        assert out[0, 0, 150, 3].isnan()


@each_mode
@each_rotation
def test_zeros_and_constants(name: str, mode: str, rotate: bool) -> None:
    q, k, v = random_qkv((1, 2, 200, 64), (1, 2, 200, 64))
    for inputs in ((torch.zeros_like(q), k, v), (q, torch.zeros_like(k), v), (q, k, torch.ones_like(v))):
        check(name, *inputs, mode, rotate=rotate)
    out, _ = run(name, q, k, torch.zeros_like(v), mode=mode, rotate=rotate)
    assert not out.any()
