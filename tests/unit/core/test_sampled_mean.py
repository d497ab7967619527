"""K's mean from a sample of its tokens: which tokens these are, and that they represent all."""

from __future__ import annotations

import pytest
import torch

from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.smoothing import SAMPLED_TOKENS, sampled_tokens, smooth_tokens
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.reference.preparation import prepare


@pytest.mark.parametrize("length", [1, 77, 127, 128])
def test_few_tokens_are_all_sampled(length: int) -> None:
    assert sampled_tokens(length).tolist() == list(range(length))


def place_of_the_kernels(number: int, width: int) -> int:
    """The formula of csrc/common/sampled_keys.cuh, in 32-bit integers."""
    mixed = number * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed // 2**16) * 0x85EBCA6B % 2**32
    mixed ^= mixed // 2**13
    return mixed * width // 2**32


@pytest.mark.parametrize("length", [129, 200, 1000, 4096, 75_600, 2**31 - 256])
def test_each_of_128_parts_has_one_sampled_token(length: int) -> None:
    parts = [length * number // 128 for number in range(129)]
    tokens = sampled_tokens(length).tolist()
    for number, token in enumerate(tokens):
        assert token == parts[number] + place_of_the_kernels(number, parts[number + 1] - parts[number])
        assert parts[number] <= token < parts[number + 1]


@pytest.mark.parametrize("length", [4096, 4608, 32_760, 75_600])
def test_samples_do_not_align_with_the_periods_of_pictures_and_videos(length: int) -> None:
    """Rows have 16 to 128 tokens, frames 1,560 and 3,600. No sixteenth of a period has more than a few samples."""
    for period in (16, 26, 30, 32, 40, 52, 64, 80, 104, 128, 1560, 3600):
        if length < 8 * period:
            continue
        places = sampled_tokens(length) % period * 16 // period
        assert int(places.bincount(minlength=16).max()) <= 20, period


def test_the_mean_is_that_of_the_sample() -> None:
    x = torch.randn(2, 3, 1000, 16)
    centered, mean = smooth_tokens(x, sampled=SAMPLED_TOKENS)
    assert torch.equal(mean, x[:, :, sampled_tokens(1000)].mean(dim=2, keepdim=True))
    assert torch.equal(centered, x - mean)
    assert torch.equal(smooth_tokens(x)[1], x.mean(dim=2, keepdim=True))


def test_hidden_tokens_are_not_sampled() -> None:
    """Their values do not matter. If a mask may hide tokens, the mean is that of all others."""
    x, hidden = torch.randn(1, 2, 600, 16), torch.arange(600)[None] % 3 == 1
    x[:, :, 1::3] = torch.nan
    _, mean = smooth_tokens(x, hidden, SAMPLED_TOKENS)
    torch.testing.assert_close(mean, x[:, :, ~hidden[0]].mean(dim=2, keepdim=True))


def test_calls_use_the_sampled_mean_and_the_papers_options_the_full_one() -> None:
    q, k, v = (torch.randn(1, 1, 500, 32) for _ in range(3))
    of_call = ReferenceOptions.of(AttentionOptions())
    for options, wanted in ((of_call, k[:, :, sampled_tokens(500)]), (ReferenceOptions(), k)):
        k_mean = prepare(q, k, v, options).k_mean
        assert k_mean is not None
        torch.testing.assert_close(k_mean, wanted.mean(dim=2, keepdim=True))
    of_q_alone = prepare(q, k, v, ReferenceOptions(smooth_q=True, smooth_k=False))
    assert of_q_alone.q_block_means is not None and of_q_alone.k_mean is None
