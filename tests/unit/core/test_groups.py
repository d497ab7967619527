"""Which tokens share a scale, according to the paper's section 3.2 and appendix A.6."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.quantize.formats import E4M3, INT4, INT8
from comfy_sage2.quantize.groups import (
    ADA,
    HOPPER_8B,
    PER_BLOCK,
    PER_TENSOR,
    PER_TOKEN,
    key_groups,
    query_groups,
)
from comfy_sage2.quantize.quantizers import quantize_channels, quantize_groups


def members(groups: torch.Tensor) -> set[frozenset[int]]:
    return {frozenset((groups == group).nonzero().flatten().tolist()) for group in groups.unique()}


def test_ada_query_groups_are_rows_8_apart_within_each_warps_32() -> None:
    expected = set()
    for warp_start in range(0, 256, 32):
        for i in range(8):
            expected.add(frozenset(warp_start + row for row in (i, 8 + i, 16 + i, 24 + i)))
    groups = members(query_groups(256, ADA))
    assert groups == expected
    assert len(groups) == 2 * 32  # the paper: 32 groups for Q in a block of 128


@pytest.mark.parametrize(("scheme", "block"), [(ADA, 64), (HOPPER_8B, 64)])
def test_key_groups_are_four_column_pairs_of_every_eight(scheme: Any, block: int) -> None:
    expected = set()
    for block_start in range(0, 256, block):
        for t in range(4):
            expected.add(frozenset(block_start + 8 * j + 2 * t + c for j in range(block // 8) for c in (0, 1)))
    assert members(key_groups(256, scheme)) == expected


def test_groups_per_token_block_and_tensor() -> None:
    assert len(members(key_groups(70, PER_TOKEN))) == 70
    assert members(query_groups(300, PER_BLOCK)) == {
        frozenset(range(128)),
        frozenset(range(128, 256)),
        frozenset(range(256, 300)),
    }
    assert members(key_groups(70, PER_BLOCK)) == {frozenset(range(64)), frozenset(range(64, 70))}
    assert members(query_groups(300, PER_TENSOR)) == {frozenset(range(300))}


@pytest.mark.parametrize("length", [1, 7, 31, 129, 200])
def test_a_ragged_tail_keeps_the_pattern(length: int) -> None:
    assert torch.equal(query_groups(length, ADA), query_groups(256, ADA)[:length])
    assert torch.equal(key_groups(length, ADA), key_groups(256, ADA)[:length])


@pytest.mark.parametrize(("number_format", "maximum"), [(INT8, 127), (INT4, 7), (E4M3, 448)])
@pytest.mark.parametrize("length", [1, 50, 300])
def test_each_group_is_scaled_to_its_own_largest_magnitude(number_format: Any, maximum: int, length: int) -> None:
    x = torch.randn(2, 3, length, 24) * torch.rand(2, 3, length, 1) * 10
    groups = query_groups(length, ADA)
    quantized = quantize_groups(x, groups, number_format)
    for group in groups.unique():
        part = groups == group
        amax = x[:, :, part].abs().amax(dim=(2, 3))
        scale = quantized.scale[:, :, part]
        torch.testing.assert_close(scale[..., 0], (amax / maximum)[:, :, None].expand(scale.shape[:3]))
        assert (quantized.values[:, :, part].abs().amax(dim=(2, 3)) == maximum).all()
    if number_format is not E4M3:
        assert torch.equal(quantized.values, quantized.values.round())
        assert ((quantized.values * quantized.scale - x).abs() <= quantized.scale * 0.5001).all()


def test_integers_round_half_to_even() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 7.0]).reshape(1, 1, 6, 1)
    values = quantize_groups(x, torch.zeros(6, dtype=torch.int64), INT4).values.flatten()
    assert values.tolist() == [0, 2, 2, 0, -2, 7]


def test_channels_of_v_have_their_own_scales() -> None:
    v = torch.randn(2, 3, 200, 16) * torch.logspace(-3, 3, 16)
    quantized = quantize_channels(v, E4M3)
    torch.testing.assert_close(quantized.scale, v.abs().amax(2, keepdim=True) / 448)
    assert ((quantized.values * quantized.scale - v).abs() <= v.abs() / 16 * 1.001 + quantized.scale * 2**-10).all()


@pytest.mark.parametrize("loudness", [1, 300, 0.01, 0.0])
def test_an_outlier_token_of_v_does_not_coarsen_others(loudness: float, fresh_seed: int) -> None:
    """The tokens of a tile share a scale, or have one each if they are unlike."""
    generator = torch.Generator().manual_seed(fresh_seed)
    v = torch.randn(2, 3, 150, 64, generator=generator).clamp_(-2.5, 2.5) * torch.logspace(-3, 3, 64)
    v[:, :, 70] *= loudness
    quantized = quantize_channels(v, INT8, tile=64)
    assert quantized.token_term is not None
    relative = v.abs() / v.abs().amax(2, keepdim=True)
    for first in (0, 64, 128):
        tokens = slice(first, first + 64)
        term = quantized.token_term[:, :, tokens]
        assert (term <= 0.0).all()
        if first == 64 or loudness < 2:  # a loud token makes the channels of other tiles unlike, too
            assert (term != 0.0).any() == (first == 64 and loudness != 1)
        step = relative[:, :, tokens].amax((2, 3), keepdim=True) / 127
        numbers = quantized.values[:, :, tokens] / 127 / step
        assert ((numbers - numbers.round()).abs() < 1e-3).all() and numbers.round().abs().amax() == 127
        error = (quantized.values[:, :, tokens] * term.exp2() * quantized.scale - v[:, :, tokens]).abs()
        assert (error <= v.abs().amax(2, keepdim=True) * step * term.exp2() * 0.501).all()
