"""The measured errors of left out blocks, whose products a GPU computes from 16-bit numbers, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from comfy_sage2.sparsity import thresholds

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "q_length", "kv_length", "head_dim"), [(4, 2, 700, 1300, 64), (3, 3, 256, 20_000, 128)]
)
@pytest.mark.parametrize("token_major", [False, True], ids=["BHND", "BNHD in memory"])
def test_errors(
    dtype: torch.dtype, q_heads: int, kv_heads: int, q_length: int, kv_length: int, head_dim: int, token_major: bool
) -> None:
    shapes = ((q_heads, q_length), (kv_heads, kv_length), (kv_heads, kv_length))
    q, k, v = (torch.randn(2, heads, length, head_dim, device="cuda") for heads, length in shapes)
    k[:, 0, :300] += 2.0 * q[:, 0, :1]  # a head that attends to few of its keys, and others that attend to all
    if token_major:
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    blocks = (-(-q_length // 128), -(-kv_length // 128))
    scores = thresholds.rank_(torch.randn(2, q_heads, *blocks, device="cuda"))
    compared = torch.rand(1, q_heads, *blocks, device="cuda") < 0.8
    compared[..., 0] = True
    candidates = thresholds.candidates(scores)
    rows, scale = thresholds.sampled_rows(q_length, 1, q.device), head_dim**-0.5
    measured = thresholds.errors(q, k, v, scores, rows, scale=scale, thresholds=candidates, compared=compared)

    group = q_heads // kv_heads
    q, k, v = q.double()[:, :, rows], *(tensor.double().repeat_interleave(group, 1) for tensor in (k, v))
    logits = q @ k.mT * scale
    exact = logits.softmax(3) @ v
    active = [scores > threshold[..., None, None] for threshold in candidates.unbind(2)] + [compared.expand_as(scores)]
    for place, kept in enumerate(active):
        tokens = kept[:, :, rows // 128].repeat_interleave(128, 3)[..., :kv_length]
        out = logits.masked_fill(~tokens, float("-inf")).softmax(3) @ v
        expected = (out - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
        # Rounding P to the dtype changes what is measured by less than a hundredth.
        torch.testing.assert_close(measured[..., place].double(), expected, rtol=1e-2, atol=2e-4)


def test_small_probabilities_of_long_fp16_calls_count() -> None:
    """300,000 keys that hold 1.4 % of the probability together, each less than fp16's smallest number."""
    near, far, blocks = 128, 299_904, 2344
    q = torch.zeros(1, 1, 128, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.zeros(1, 1, near + far, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    q[..., 0], k[..., :near, 0] = 8.0, 3.0
    v[..., :near, 0], v[..., near:, 1] = 1.0, 1.0
    compared = torch.zeros(1, 1, 1, blocks, device="cuda", dtype=torch.bool)
    compared[..., 0] = True
    rows, scores = torch.arange(64, device="cuda"), torch.zeros(1, 1, 1, blocks, device="cuda")
    at = torch.full((1, 1, 1), -1.0, device="cuda")
    measured = thresholds.errors(q, k, v, scores, rows, scale=0.5, thresholds=at, compared=compared)
    of_near = near * math.exp(0.5 * 8.0 * 3.0)
    many = far / (of_near + far)
    assert 0.01 < many < 0.02 and 1 / (of_near + far) < 2**-24
    expected = math.hypot(many, many) / math.hypot(1 - many, many)
    assert measured[0, 0, 0].item() < 1e-6 and measured[0, 0, 1].item() == pytest.approx(expected, rel=1e-2)


def test_errors_where_torch_may_sum_in_fp16() -> None:
    """ComfyUI's --fast fp16_accumulation, with which torch refuses products of fp16 into float32."""
    if not hasattr(torch.ops.aten.bmm, "dtype_out"):
        pytest.skip("this torch has no products of fp16 into float32")
    q, k, v = (torch.randn(1, 2, 1300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    scores = thresholds.rank_(torch.randn(1, 2, 11, 11, device="cuda"))
    rows, at = thresholds.sampled_rows(1300, 1, q.device), thresholds.candidates(scores)
    expected = thresholds.errors(q, k, v, scores, rows, scale=0.125, thresholds=at)
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        measured = thresholds.errors(q, k, v, scores, rows, scale=0.125, thresholds=at)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before
    torch.testing.assert_close(measured, expected, rtol=1e-2, atol=2e-4)
