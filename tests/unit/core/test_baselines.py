"""The baselines: each keeps the scores it should, and errs by about what has been measured of the real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import cosine, oracle, relative_l1

from comfy_sage2.quantize.accumulators import ACCUMULATE_FP32
from comfy_sage2.quantize.formats import FP32
from comfy_sage2.reference.attention import reference_attention
from lab import baselines
from lab.baselines import UNSMOOTHED_4B, channel_factors, random_hadamard

PRECISE = replace(UNSMOOTHED_4B, qk_format=FP32, p_format=FP32, v_format=FP32, accumulator=ACCUMULATE_FP32)


def inputs(length: int = 200, head_dim: int = 80, q_heads: int = 4, kv_heads: int = 2) -> Any:
    q = torch.randn(2, q_heads, length, head_dim)
    k, v = (torch.randn(2, kv_heads, length + 30, head_dim) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("head_dim", [1, 2, 64, 80, 128])
def test_hadamard_rotation_is_orthonormal_with_entries_of_one_size(head_dim: int) -> None:
    rotation = random_hadamard(head_dim, seed=3)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(head_dim))
    assert rotation.abs().max() - rotation.abs().min() < 1e-6
    if head_dim > 2:
        assert not torch.equal(rotation, random_hadamard(head_dim, seed=4))


@pytest.mark.parametrize("baseline", [baselines.hadamard_attention, baselines.smooth_attention])
def test_transforms_leave_precise_attention_unchanged(baseline: Any) -> None:
    q, k, v = inputs()
    out, _ = baseline(q, k, v, PRECISE)
    torch.testing.assert_close(out.double(), oracle(q, k, v)[0], rtol=1e-3, atol=1e-4)


def test_smoothquant_factors_at_alpha_one_half_even_out_q_and_k() -> None:
    q, k, _ = inputs()
    q, k = q * torch.logspace(-1, 1, 80), k * torch.logspace(1, 0, 80)
    factors = channel_factors(q, k, 0.5)
    q_amax = (q / factors.repeat_interleave(2, 1)).abs().amax(2).unflatten(1, (2, 2)).amax(2)
    torch.testing.assert_close(q_amax, (k * factors).abs().amax(2))


def test_hadamard_spreads_a_single_outlier_channel() -> None:
    q, k, v = inputs(400, 128)
    k[..., 5] *= 30
    plain = relative_l1(reference_attention(q, k, v, UNSMOOTHED_4B)[0], oracle(q, k, v)[0])
    assert relative_l1(baselines.hadamard_attention(q, k, v)[0], oracle(q, k, v)[0]) < 0.8 * plain


@pytest.mark.slow
def test_errors_are_those_measured_of_the_real_kernels() -> None:
    # Measured on a Hopper GPU for this input: sageattention 1.0.6 relative L1 0.0132, FlashAttention-3 FP8 0.0523.
    q, k, v = (torch.randn(1, 2, 2048, 128) for _ in range(3))
    expected, _ = oracle(q, k, v)
    assert 0.0105 < relative_l1(baselines.sage_attention1(q, k, v)[0], expected) < 0.0165
    assert 0.046 < relative_l1(baselines.flash_attention3_fp8(q, k, v)[0], expected) < 0.059


@pytest.mark.parametrize("baseline", [baselines.sage_attention1, baselines.flash_attention3_fp8])
def test_masks_causal_and_scale_reach_the_algorithm(baseline: Any) -> None:
    q, k, v = inputs()
    mask = torch.rand(1, 1, 200, 230) > 0.2
    mask[..., 0] = True
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": True, "scale": 0.2}
    assert cosine(baseline(q, k, v, **options)[0], oracle(q, k, v, **options)[0]) > 0.995
