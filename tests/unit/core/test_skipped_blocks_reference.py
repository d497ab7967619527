"""Skipped blocks: their definition in float64, and what a call without them keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import oracle, relative_l1
from video_samples import video_samples

from comfy_sage2 import BlockMask
from comfy_sage2.quantize.formats import FP32
from comfy_sage2.quantize.fp8 import E4M3
from comfy_sage2.quantize.groups import HOPPER_8B
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.block_margins import LOSSLESS, block_margins
from comfy_sage2.reference.options import ReferenceOptions

UNQUANTIZED = ReferenceOptions(qk_format=FP32, smooth_k=False)
# As the 8-bit kernels add up a row and go through its keys.
KERNELS = replace(ReferenceOptions(), sum_quantized_p=True, diagonal_early=True)
HOPPER = replace(KERNELS, groups=HOPPER_8B, keys_per_step=128, last_keys_first=True)


def defined(q: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
    """The largest s - m of each block in log2, in float64 from all scores at once; m is the row's maximum."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).double()
    scores = q.double() @ k.transpose(2, 3) / math.sqrt(q.shape[3]) * math.log2(math.e)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    below = (scores - scores.amax(3, keepdim=True)).nan_to_num(-math.inf, neginf=-math.inf)
    rows = torch.stack([part.amax(2) for part in below.split(128, 2)], 2)
    return torch.stack([part.amax(3) for part in rows.split(128, 3)], 3)


def graded(batch: int, q_length: int, kv_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q of four heads and k of two, whose blocks differ by many octaves in what they give to a row."""
    gains = 3 * torch.randn(batch, 2, -(-kv_length // 128), 1).repeat_interleave(128, 2)[:, :, :kv_length]
    return torch.randn(batch, 4, q_length, 32) + 1, torch.randn(batch, 2, kv_length, 32) + gains


@pytest.mark.parametrize("keys_per_step", [64, 128, 192, 96])
@pytest.mark.parametrize("last_keys_first", [False, True])
@pytest.mark.parametrize("diagonal_early", [False, True])
@pytest.mark.parametrize("q_length", [300, 450])
def test_margins_are_as_defined(keys_per_step: int, last_keys_first: bool, diagonal_early: bool, q_length: int) -> None:
    q, k = graded(2, q_length, 450)
    options = replace(
        UNQUANTIZED, keys_per_step=keys_per_step, last_keys_first=last_keys_first, diagonal_early=diagonal_early
    )
    margins = block_margins(q, k, options)
    torch.testing.assert_close(margins.double(), defined(q, k), atol=1e-4, rtol=1e-5)
    running = block_margins(q, k, options, running=True)
    assert (running >= margins).all()


def test_running_margins_follow_the_order() -> None:
    """Every block but the first adds to the scores: forwards each has a new maximum, backwards the first has it."""
    q = torch.randn(1, 2, 200, 32) + 1
    k = torch.randn(1, 2, 450, 32) + (torch.arange(450) // 128 * 12)[:, None]
    final = block_margins(q, k, UNQUANTIZED)
    assert (final[..., :-1] < -10).all() and (final[..., -1] == 0).all()
    assert (block_margins(q, k, UNQUANTIZED, running=True) == 0).all()
    backwards = replace(UNQUANTIZED, last_keys_first=True)
    torch.testing.assert_close(block_margins(q, k, backwards, running=True), final)


@pytest.mark.parametrize("last_keys_first", [False, True])
def test_the_diagonal_is_met_early(last_keys_first: bool) -> None:
    """Queries whose largest scores lie on the diagonal: with it met early the other blocks are far below at once."""
    place = torch.arange(512) // 128
    q = torch.nn.functional.one_hot(place, 32)[None, None] * 40.0
    k = torch.nn.functional.one_hot(place, 32)[None, None] * 4.0
    options = replace(UNQUANTIZED, keys_per_step=128, last_keys_first=last_keys_first)
    early = replace(options, diagonal_early=True)
    found = [block_margins(q, k, each, running=True)[0, 0] < -10 for each in (options, early)]
    behind = (
        torch.ones(4, 4, dtype=torch.bool).tril(-1) if last_keys_first else torch.ones(4, 4, dtype=torch.bool).triu(1)
    )
    assert torch.equal(found[0], behind)
    others = ~torch.eye(4, dtype=torch.bool)
    if last_keys_first:
        others[:, 3] = False  # it comes first
    assert torch.equal(found[1], others)


@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_count(is_causal: bool) -> None:
    q, k = graded(1, 300, 300)
    mask = torch.rand(1, 1, 300, 300) > 0.3
    mask[:, :, 128:256] = False  # a block of rows without keys
    allowed = mask & torch.ones(300, 300, dtype=torch.bool).tril() if is_causal else mask
    margins = block_margins(q, k, UNQUANTIZED, is_causal=is_causal, attn_mask=mask)
    torch.testing.assert_close(margins.double(), defined(q, k, allowed), atol=1e-4, rtol=1e-5)
    assert (margins[:, :, 1] == -math.inf).all() and (margins[:, :, 0, 2] == -math.inf).all() == is_causal


def test_a_block_with_nan_is_not_skipped() -> None:
    q, k = torch.randn(1, 1, 256, 16), torch.randn(1, 1, 256, 16)
    q[0, 0, 130, 3] = math.nan
    assert block_margins(q, k, UNQUANTIZED)[0, 0, 1].isnan().all()  # which is not at most any threshold


def test_the_lossless_threshold_is_that_of_e4m3() -> None:
    p = torch.exp2(torch.tensor([LOSSLESS, LOSSLESS + 0.01]))
    assert (E4M3.round(p * 448.0) > 0).tolist() == [False, True]


def video(frames: int = 6, heads: int = 2, peaks: tuple[float, ...] = (36.0,)) -> Any:
    """q, k, v of 128 tokens a frame; a frame is a block."""
    (sample,) = video_samples(
        int(torch.randint(2**31, ())), frames=frames, height=8, width=16, heads=heads, head_dim=64, peaks=peaks
    )
    return sample.q, sample.k, sample.v


@pytest.mark.parametrize(
    ("options", "is_causal"),
    [(KERNELS, False), (KERNELS, True), (HOPPER, False), (HOPPER, True), (replace(HOPPER, keys_per_step=192), False)],
    ids=["as Ada", "as Ada, causal", "as Hopper", "as Hopper, causal", "as Hopper, steps over blocks"],
)
def test_without_lossless_blocks_the_bits_are_the_same(options: ReferenceOptions, is_causal: bool) -> None:
    q, k, v = video()
    skipped = block_margins(q, k, options, is_causal=is_causal, running=True) <= LOSSLESS
    visible = torch.ones(6, 6, dtype=torch.bool).tril() if is_causal else torch.ones(6, 6, dtype=torch.bool)
    assert (skipped & visible).any() and not skipped.all()
    lists = BlockMask.from_dense(~skipped, is_causal=is_causal)
    expected, expected_lse = reference_attention(q, k, v, options, is_causal=is_causal)
    out, lse = reference_attention(q, k, v, options, is_causal=is_causal, active_blocks=lists.to_dense())
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    # One active block more taken out is seen.
    fewer = lists.to_dense()
    fewer[0, 0, 3, 3] = False
    assert not torch.equal(reference_attention(q, k, v, options, is_causal=is_causal, active_blocks=fewer)[0], expected)


@pytest.mark.parametrize("rotate", [False, True])
def test_against_the_final_maximum_more_blocks_are_skipped_and_little_is_lost(rotate: bool) -> None:
    q, k, v = video()
    options = replace(ReferenceOptions(), rotate=rotate)
    final, running = (block_margins(q, k, options, running=each) <= LOSSLESS for each in (False, True))
    assert (running <= final).all() and final.sum() > running.sum()
    dense = reference_attention(q, k, v, options)[0]
    assert relative_l1(reference_attention(q, k, v, options, active_blocks=~final)[0], dense) < 2e-3
    exact = oracle(q, k, v)[0]
    allowed = (~final).repeat_interleave(128, 2).repeat_interleave(128, 3)
    # Each of the 768 keys left out has at most 2^LOSSLESS of the row's largest probability.
    assert (oracle(q, k, v, attn_mask=allowed)[0] - exact).abs().max() < 768 * 2**LOSSLESS * 2 * v.abs().max()


def test_video_like_scores_are_local() -> None:
    """The nearest token has the largest score, and one far away in time, height or width has none of it."""
    (sample,) = video_samples(3, frames=4, height=8, width=16, heads=2, head_dim=256, peaks=(40.0,))
    scores = (sample.q.double() @ sample.k.double().transpose(2, 3) / 16).view(2, 512, 4, 8, 16)
    place = (1 * 8 + 4) * 16 + 8  # frame 1, row 4, column 8
    around = scores[0, place]  # of the narrow head
    assert around[1, 4, 8] > 30 and around.max() == around[1, 4, 8]
    assert around[1, 4, 9] > around[1, 4, 14] + 10 and around[1, 5, 8] > around[1, 0, 8] + 10
    assert around[2, 4, 8] > around[3, 0, 8] + 10
    again = video_samples(3, frames=4, height=8, width=16, heads=2, head_dim=256, peaks=(40.0,))
    assert torch.equal(again[0].q, sample.q) and not torch.equal(sample.q, sample.k)
