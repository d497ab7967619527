"""Hopper's attention kernels that quantize Q themselves: they serve calls with few keys and no LSE."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .builds import (
    EXACT_BOUND,
    exact,
    random_qkv,
    relative_l1,
    run,
    views_with_nan_between,
)

pytestmark = pytest.mark.gpu

NAME = "sm90"
each_head_dim = pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 128])
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def both(*inputs: torch.Tensor, **choices: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the kernel that quantizes Q, and that of the kernel after a pass over Q, for calls with an LSE."""
    return run(NAME, *inputs, mode="8b", **choices)[0], run(NAME, *inputs, mode="8b", return_lse=True, **choices)[0]


@each_dtype
@each_head_dim
@pytest.mark.parametrize("lengths", [(1, 1), (130, 77), (64, 128), (333, 512), (700, 1000), (129, 2048)], ids=str)
@pytest.mark.parametrize("smooth_v", [False, True], ids=["plain_v", "smooth_v"])
def test_quantizing_q_in_attention_gives_the_bits_of_a_pass_over_q(
    dtype: torch.dtype, head_dim: int, lengths: tuple[int, int], smooth_v: bool, fresh_seed: int
) -> None:
    q, k, v = random_qkv((2, 6, lengths[0], head_dim), (2, 3, lengths[1], head_dim), dtype, outliers=smooth_v)
    before = [tensor.clone() for tensor in (q, k, v)]
    out, wanted = both(q, k, v, smooth_v=smooth_v)
    assert torch.equal(out, wanted)
    assert relative_l1(out, exact(q, k, v)[0]) <= EXACT_BOUND["8b"]
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((q, k, v), before, strict=True))


@each_dtype
@each_head_dim
def test_views_of_tensors_that_are_nan_between(dtype: torch.dtype, head_dim: int, fresh_seed: int) -> None:
    q, k, v = views_with_nan_between(head_dim, dtype)
    k = k[:, :, :250]
    v = v[:, :, :250]
    out, wanted = both(q, k, v)
    assert torch.equal(out, wanted)
    assert relative_l1(out, exact(q, k, v)[0]) <= EXACT_BOUND["8b"]


# Bound between outputs whose exponents are rounded once and twice, which changes a few of the 8-bit probabilities.
SAME_STEPS = 1e-3


@each_dtype
@each_head_dim
@pytest.mark.parametrize("lengths", [(130, 77), (200, 512), (333, 700), (129, 2048)], ids=str)
def test_masks_for_all_queries(dtype: torch.dtype, head_dim: int, lengths: tuple[int, int], fresh_seed: int) -> None:
    """Bool and additive masks: one batch entry hides random keys, one all keys, and one keys around the middle."""
    queries, keys = lengths
    q, k, v = random_qkv((3, 6, queries, head_dim), (3, 3, keys, head_dim), dtype)
    attends = torch.ones(3, 1, 1, keys, dtype=torch.bool, device="cuda")
    attends[0] = torch.rand(keys, device="cuda") < 0.5
    attends[1] = False
    attends[2, ..., keys // 3 : keys // 2] = False
    terms = torch.randn(3, 1, 1, keys, device="cuda").to(dtype).masked_fill(~attends, -torch.inf)
    for mask in (attends, terms, terms.float(), torch.stack((attends, ~attends), -1)[..., 0]):
        out, wanted = both(q, k, v, attn_mask=mask)
        assert torch.equal(out, wanted)
        assert not out[1].any()
        assert relative_l1(out[::2], exact(q, k, v, attn_mask=mask)[0][::2]) <= EXACT_BOUND["8b"]


@each_dtype
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("lengths", [(333, 700), (130, 512), (1000, 1000), (129, 2048), (2048, 2048)], ids=str)
def test_padding_masks(dtype: torch.dtype, head_dim: int, lengths: tuple[int, int], fresh_seed: int) -> None:
    """Padding as from text encoders: whole blocks of keys may be hidden, and each batch entry has another length."""
    queries, keys = lengths
    ends = torch.tensor([keys, keys - 1, keys // 2, keys // 5, 385, 384, 449, 129, 128, 65, 64, 1], device="cuda")
    q, k, v = random_qkv((len(ends), 2, queries, head_dim), (len(ends), 1, keys, head_dim), dtype)
    attends = torch.arange(keys, device="cuda") < ends.view(-1, 1, 1, 1)
    # In self-attention the diagonal block comes second, so the order differs when one kernel leaves out blocks.
    last_block = (keys - 1) // 128 * 128
    same_order = [entry for entry, end in enumerate(ends.tolist()) if queries != keys or end > last_block]
    masks = [attends]
    for mask_dtype in {dtype, torch.float32}:
        for hidden in (-torch.inf, torch.finfo(mask_dtype).min):
            masks.append(torch.zeros(attends.shape, dtype=mask_dtype, device="cuda").masked_fill(~attends, hidden))
    for mask in masks:
        out, wanted = both(q, k, v, attn_mask=mask)
        for entry in same_order:
            assert relative_l1(out[entry], wanted[entry]) <= SAME_STEPS, ends[entry]
        assert relative_l1(out, exact(q, k, v, attn_mask=mask)[0]) <= EXACT_BOUND["8b"]
    # Some entries also have another term, or a hidden key among visible ones.
    mask = torch.zeros(attends.shape, device="cuda").masked_fill(~attends, -torch.inf)
    mask[::2, ..., 0] = torch.randn(1).item()
    mask[1, ..., 3] = -torch.inf
    out, wanted = both(q, k, v, attn_mask=mask)
    # With this mask the other kernel leaves out blocks too.
    for entry in same_order:
        if entry % 2 == 0 or entry == 1:
            assert relative_l1(out[entry], wanted[entry]) <= SAME_STEPS, ends[entry]
            assert ends[entry] <= last_block or torch.equal(out[entry], wanted[entry]), ends[entry]
    assert relative_l1(out, exact(q, k, v, attn_mask=mask)[0]) <= EXACT_BOUND["8b"]


@pytest.mark.parametrize(("batches", "heads"), [(1, 4), (3, 1), (1, 1)], ids=["batches", "heads", "both"])
def test_queries_expanded_by_a_stride_of_zero(batches: int, heads: int, fresh_seed: int) -> None:
    """Views with stride 0."""
    q, k, v = random_qkv((batches, heads, 200, 128), (3, 4, 300, 128), torch.bfloat16)
    out, _ = run(NAME, q.expand(3, 4, 200, 128), k, v, mode="8b")
    assert torch.equal(out, run(NAME, q.expand(3, 4, 200, 128).contiguous(), k, v, mode="8b")[0])


@each_dtype
def test_rows_of_zeros_and_of_extreme_numbers(dtype: torch.dtype, fresh_seed: int) -> None:
    """Rows of zeros, of the smallest and the largest numbers, and of one number beside zeros."""
    q, k, v = random_qkv((1, 2, 300, 128), (1, 2, 300, 128), dtype)
    q[:, :, ::5] = 0.0
    q[:, :, 1::5] *= torch.finfo(dtype).tiny
    q[:, :, 2::5] = torch.finfo(dtype).max * torch.sign(q[:, :, 2::5])
    q[:, :, 3::5, 1:] = 0.0
    out, wanted = both(q, k, v, scale=1e-3)
    assert torch.equal(out, wanted)
    assert out.isfinite().all()


@each_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_that_is_not_finite_stays_alone_and_is_noted(
    dtype: torch.dtype, value: float, head_dim: int, fresh_seed: int
) -> None:
    q, k, v = random_qkv((1, 2, 300, head_dim), (1, 2, 512, head_dim), dtype)
    clean, _ = run(NAME, q, k, v, mode="8b")
    q[0, 1, 137, head_dim - 1] = value
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    out, _ = run(NAME, q, k, v, mode="8b", nonfinite=flag)
    assert flag.item()
    assert out[0, 1, 137].isnan().all()
    out[0, 1, 137] = clean[0, 1, 137]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_part_of_the_heads_gives_the_same_bits(head_dim: int, fresh_seed: int) -> None:
    q, k, v = random_qkv((3, 24, 1000, head_dim), (3, 24, 512, head_dim), torch.bfloat16)
    out, _ = run(NAME, q, k, v, mode="8b")
    for entry, heads in (((0, 1), (0, 1)), ((2, 3), (5, 23))):
        part = [tensor[slice(*entry), slice(*heads)] for tensor in (q, k, v)]
        assert torch.equal(run(NAME, *part, mode="8b")[0], out[slice(*entry), slice(*heads)])
