"""Mode "precise" in the reference, against its definition written out in float64; which backends have it."""

from __future__ import annotations

import math

import pytest
import torch

import comfy_sage2
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.groups import ADA, HOPPER_8B, GroupScheme
from comfy_sage2.quantize.smoothing import sampled_tokens
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.options import ReferenceOptions


def _rounded(x: torch.Tensor, group_of: list[int]) -> torch.Tensor:
    """Tokens (N, D) rounded to 127 steps of their group's largest magnitude."""
    result = torch.empty_like(x)
    for group in set(group_of):
        tokens = [n for n, g in enumerate(group_of) if g == group]
        scale = x[tokens].abs().max() / 127
        result[tokens] = (x[tokens] / scale).round() * scale
    return result


def _definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, per_token: bool) -> torch.Tensor:
    """One head, (N, D) float64: smoothed INT8 K, INT8 Q, then the softmax and its product with V exactly."""
    rows = [n if per_token else n // 32 * 8 + n % 8 for n in range(len(q))]
    k_mean = k[sampled_tokens(len(k))].mean(0)
    k_hat = _rounded(k - k_mean, [n // 64 * 4 + n % 8 // 2 for n in range(len(k))])
    return (_rounded(q, rows) @ k_hat.T / math.sqrt(q.shape[1])).softmax(1) @ v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [ADA, HOPPER_8B], ids=lambda groups: groups.name)
def test_reference_is_the_definition(groups: GroupScheme, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(300, 32).to(dtype) for _ in range(3))
    k = k + 3 * torch.randn(32).to(dtype)
    expected = _definition(q.double(), k.double(), v.double(), per_token=groups is HOPPER_8B)
    options = ReferenceOptions.of(AttentionOptions("precise", rotate="off"), groups=groups, dtype=dtype)
    out, _ = reference_attention(q[None, None], k[None, None], v[None, None], options)
    difference = (out[0, 0].double() - expected).abs()
    # P is rounded at random: what is left of 2^-12 or 2^-9 after a mean over the keys. A value of K that is a tie moves
    # every row a little.
    assert difference.median() < {torch.float16: 1e-4, torch.bfloat16: 8e-4, torch.float32: 2e-5}[dtype]
    assert difference.mean() < 1e-3 * expected.abs().mean() + difference.median()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_between_8b_and_full_precision(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 4, 1024, 64).to(dtype) for _ in range(3))
    wanted, _ = exact_attention(q, k, v)

    def error(mode: str) -> float:
        out = comfy_sage2.attention(q, k, v, mode=mode, backend="reference")
        return float((out.double() - wanted).abs().sum() / wanted.abs().sum())

    # That of 8b is nearly all from P and V in E4M3.
    assert error("precise") < 0.0125
    assert error("8b") > 2.5 * error("precise")


def test_smooth_v_changes_nothing() -> None:
    q, k, v = (torch.randn(1, 2, 100, 64) for _ in range(3))
    plain = comfy_sage2.attention(q, k, v + 5, mode="precise")
    assert torch.equal(plain, comfy_sage2.attention(q, k, v + 5, mode="precise", smooth_v=True))
