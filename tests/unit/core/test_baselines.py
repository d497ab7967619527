"""The baselines: each takes masks, causality and scale, and its error is about that measured of the real kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import cosine, oracle, relative_l1

from lab import baselines
from lab.baselines import random_hadamard


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
