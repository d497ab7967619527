"""The reference against Algorithm 1 of the paper and against mode precise, written as plain loops for one head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.groups import ADA, HOPPER_8B, GroupScheme
from comfy_sage2.quantize.smoothing import sampled_tokens
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

Numbers = npt.NDArray[np.float64]


def round_e4m3(x: Numbers) -> Numbers:
    """Round to the nearest number with 3 mantissa bits, exponents from -6, and at most 448."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6)
    result: Numbers = np.clip(np.round(x / 2.0 ** (exponent - 3)) * 2.0 ** (exponent - 3), -448, 448)
    return result


def quantize(x: Numbers, group_of: list[int], limit: int) -> Numbers:
    """Round each token at its group's scale; the result is dequantized."""
    result = np.empty_like(x)
    for group in set(group_of):
        tokens = [n for n, g in enumerate(group_of) if g == group]
        scale = np.abs(x[tokens]).max() / limit
        result[tokens] = np.round(x[tokens] / scale) * scale
    return result


def algorithm1(
    q: Numbers,
    k: Numbers,
    v: Numbers,
    *,
    limit: int,
    smooth_q: bool,
    block_k: int,
    thread_q: bool,
    step: int | None = None,
    last_first: bool = False,
) -> Numbers:
    block_q, length, head_dim = 128, *q.shape
    k = k - k.mean(0)
    v_scale = np.abs(v).max(0) / 448
    v_hat = round_e4m3(v / v_scale)
    k_hat = quantize(k, [n // block_k * 4 + n % 8 // 2 for n in range(len(k))], limit)
    out = np.empty((length, v.shape[1]))
    for start in range(0, length, block_q):
        q_i = q[start : start + block_q]
        q_mean = q_i.mean(0) if smooth_q else np.zeros(head_dim)
        q_hat = quantize(q_i - q_mean, [n // 32 * 8 + n % 8 if thread_q else n for n in range(len(q_i))], limit)
        m, total = np.full(len(q_i), -math.inf), np.zeros(len(q_i))
        o = np.zeros((len(q_i), v.shape[1]))
        step = step or block_k
        for j in range(0, len(k), step)[:: -1 if last_first else 1]:
            s = (q_hat @ k_hat[j : j + step].T + q_mean @ k[j : j + step].T) / math.sqrt(head_dim)
            new = np.maximum(m, s.max(1))
            p = np.exp(s - new[:, None])
            decay = np.exp(m - new)
            total = decay * total + p.sum(1)
            o = decay[:, None] * o + round_e4m3(p * 448) @ v_hat[j : j + step]
            m = new
        out[start : start + block_q] = o / total[:, None] / 448 * v_scale
    return out


@pytest.mark.parametrize("length", [200, 333])
@pytest.mark.parametrize(("mode", "groups"), [("8b", ADA), ("8b", HOPPER_8B), ("4b", ADA)])
def test_reference_is_algorithm_1(length: int, mode: str, groups: Any) -> None:
    q, k, v = (torch.randn(length, 32) for _ in range(3))
    q, k = q * 2 + torch.randn(32), k + 2 * torch.randn(32)
    expected = algorithm1(
        q.double().numpy(),
        k.double().numpy(),
        v.double().numpy(),
        limit=127 if mode == "8b" else 7,
        smooth_q=mode == "4b",
        block_k=groups.block_k,
        thread_q=groups is ADA,
    )
    options = as_the_paper(AttentionOptions(mode), groups)
    out, _ = reference_attention(q[None, None], k[None, None], v[None, None], options)
    # A change of one value of 4-bit K shows in every row: by 3e-4, once in a thousand draws.
    assert_same_but_for_rounding(out, expected, most=2e-3 if mode == "4b" else 2e-4)


@pytest.mark.parametrize("step", [128, 192])
def test_steps_of_the_hopper_kernels(step: int) -> None:
    q, k, v = (torch.randn(500, 32) for _ in range(3))
    expected = algorithm1(
        q.double().numpy(), k.double().numpy(), v.double().numpy(),
        limit=127, smooth_q=False, block_k=64, thread_q=False, step=step, last_first=True,
    )  # fmt: skip
    options = replace(as_the_paper(AttentionOptions(), HOPPER_8B), keys_per_step=step)
    tensors = q[None, None], k[None, None], v[None, None]
    out, _ = reference_attention(*tensors, replace(options, last_keys_first=True))
    assert_same_but_for_rounding(out, expected)
    # P is rounded relative to the row maximum so far, so the order of the steps shows.
    other_order, _ = reference_attention(*tensors, options)
    assert np.abs(other_order[0, 0].double().numpy() - expected).mean() > 4e-3 * np.abs(expected).mean()


def as_the_paper(options: AttentionOptions, groups: GroupScheme) -> ReferenceOptions:
    """The paper does not rotate, and adds P to the row sum before rounding it."""
    of_kernels = ReferenceOptions.of(replace(options, rotate="off"), groups=groups)
    return replace(of_kernels, sum_quantized_p=False, k_mean_tokens=None)


def assert_same_but_for_rounding(out: torch.Tensor, expected: Numbers, most: float = 2e-4) -> None:
    difference = np.abs(out[0, 0].double().numpy() - expected)
    # float32 against float64 moves a few values across a rounding boundary; a wrong step would move them all.
    assert np.median(difference) < most
    assert difference.mean() < 1e-2 * np.abs(expected).mean()


def precise(q: Numbers, k: Numbers, v: Numbers, *, thread_q: bool) -> Numbers:
    """Smoothed INT8 K, INT8 Q, then the softmax and its product with V exactly."""
    rows = [n // 32 * 8 + n % 8 if thread_q else n for n in range(len(q))]
    k = k - k[sampled_tokens(len(k)).numpy()].mean(0)
    k_hat = quantize(k, [n // 64 * 4 + n % 8 // 2 for n in range(len(k))], 127)
    s = quantize(q, rows, 127) @ k_hat.T / math.sqrt(q.shape[1])
    p = np.exp(s - s.max(1, keepdims=True))
    result: Numbers = p / p.sum(1, keepdims=True) @ v
    return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [ADA, HOPPER_8B], ids=lambda groups: groups.name)
def test_mode_precise_of_the_reference_is_its_definition(groups: GroupScheme, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(300, 32).to(dtype) for _ in range(3))
    k = k + 3 * torch.randn(32).to(dtype)
    expected = precise(q.double().numpy(), k.double().numpy(), v.double().numpy(), thread_q=groups is ADA)
    options = ReferenceOptions.of(AttentionOptions("precise", rotate="off"), groups=groups, dtype=dtype)
    out, _ = reference_attention(q[None, None], k[None, None], v[None, None], options)
    difference = np.abs(out[0, 0].double().numpy() - expected)
    # P's rounding errors of 2^-12 or 2^-9 largely average out over the keys. A tie in the rounding of K moves every row
    # a little.
    median = np.median(difference)
    assert median < {torch.float16: 1e-4, torch.bfloat16: 8e-4, torch.float32: 2e-5}[dtype]
    assert difference.mean() < 1e-3 * np.abs(expected).mean() + median
