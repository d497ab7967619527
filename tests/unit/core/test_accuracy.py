"""The accuracy that the paper claims for each choice, on fresh random inputs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import assert_near, cosine, oracle, relative_l1, rmse

import comfy_sage2
from comfy_sage2.backends import launches
from comfy_sage2.backends.module_plan import Views
from comfy_sage2.call.signature import ANYONE, CallSignature, TensorForm
from comfy_sage2.kernels import loader
from comfy_sage2.kernels.bundled import KernelUnavailable
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP32
from comfy_sage2.quantize.formats import E4M3, E5M2, FP16, FP32, INT8
from comfy_sage2.quantize.groups import ADA, PER_BLOCK, PER_TENSOR, PER_TOKEN
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions
from lab.baselines import UNSMOOTHED_4B

pytestmark = pytest.mark.slow


def gaussian(length: int = 1024, heads: int = 4, head_dim: int = 128) -> Any:
    return tuple(torch.randn(1, heads, length, head_dim) for _ in range(3))


def with_channel_outliers(q: torch.Tensor, k: torch.Tensor, q_bias: float, k_bias: float) -> Any:
    """Six channels that are large in every token, as in the paper's Figure 3."""
    channels = torch.randperm(q.shape[3])[:6]
    q, k = q.clone(), k.clone()
    q[..., channels] += q_bias * torch.randn(6).sign()
    k[..., channels] += k_bias * torch.randn(6).sign()
    return q, k


def error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: ReferenceOptions) -> float:
    return float(relative_l1(reference_attention(q, k, v, options)[0], oracle(q, k, v)[0]))


@pytest.fixture(scope="module")
def long_gaussian() -> Any:
    # Enough heads that the figure of a draw is that of all draws: with eight it varies by one hundredth.
    inputs = gaussian(4096, 16)
    # torch's own attention in float64: the oracle's score matrices would take a gigabyte here.
    return inputs, torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in inputs))


def test_8b_criterion(long_gaussian: Any) -> None:
    inputs, expected = long_gaussian
    out = comfy_sage2.attention(*inputs, mode="8b", backend="reference")
    assert cosine(out, expected) >= 0.9992
    assert_near(out, expected, "8b", 0.039)


def test_order_of_smoothing_methods() -> None:
    # Q's outliers are the larger, as in the paper's models: there smooth Q helps more than smooth K.
    q, k, v = gaussian()
    q, k = with_channel_outliers(q, k, q_bias=12, k_bias=8)
    none = error(q, k, v, UNSMOOTHED_4B)
    smooth_k = error(q, k, v, replace(UNSMOOTHED_4B, smooth_k=True))
    smooth_q = error(q, k, v, replace(UNSMOOTHED_4B, smooth_q=True))
    both = error(q, k, v, replace(UNSMOOTHED_4B, smooth_q=True, smooth_k=True))
    assert both < 0.9 * smooth_q
    assert smooth_q < 0.9 * smooth_k
    assert smooth_k < 0.9 * none


def test_order_of_granularities() -> None:
    # Tokens of very different size: only fine groups keep the small ones.
    q, k, v = gaussian()
    k = k * torch.exp(torch.randn(1, 4, 1024, 1))
    q = q * torch.exp(0.5 * torch.randn(1, 4, 1024, 1))
    options = ReferenceOptions.of(AttentionOptions("4b"))
    token, thread, block, tensor = (
        error(q, k, v, replace(options, groups=groups)) for groups in (PER_TOKEN, ADA, PER_BLOCK, PER_TENSOR)
    )
    assert token < thread < block < tensor


def test_order_of_p_and_v_formats() -> None:
    # One key far above thousands of small P whose sum counts: uniform steps of 1/127 lose them all (section 3.3).
    q, k, v = gaussian(4096, 1)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, 0] = 0.0
    k[:, :, 0, 0] = 8 * 128**0.5
    q[..., 1:] *= 0.3
    v = v + 1.0
    options = ReferenceOptions(qk_format=FP32, smooth_k=False)
    fp16, e4m3, e5m2, int8 = (
        error(q, k, v, replace(options, p_format=number_format, v_format=number_format))
        for number_format in (FP16, E4M3, E5M2, INT8)
    )
    assert fp16 < 0.1 * e4m3
    assert e4m3 < 0.7 * e5m2
    assert e5m2 < 0.2 * int8


def test_full_precision_options_are_plain_attention() -> None:
    q, k, v = gaussian(300)
    options = ReferenceOptions(
        qk_format=FP32, smooth_q=True, smooth_v=True, p_format=FP32, v_format=FP32, accumulator=ACCUMULATE_FP32
    )
    out, lse = reference_attention(q + 3, k + 4, v + 5, options)
    expected, expected_lse = oracle(q + 3, k + 4, v + 5)
    torch.testing.assert_close(out.double(), expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


def test_two_levels_confine_the_fp22_error() -> None:
    q, k, v = gaussian(4096, 1)
    v = v + 8.5
    exact_pv = replace(ReferenceOptions(), qk_format=FP32, p_format=FP32, v_format=FP32)
    one_level = error(q, k, v, replace(exact_pv, two_level=False))
    two_level = error(q, k, v, exact_pv)
    fp32 = error(q, k, v, replace(exact_pv, accumulator=ACCUMULATE_FP32))
    assert fp32 < 0.1 * two_level
    assert two_level < 0.5 * one_level


def test_smooth_v_helps_biased_channels() -> None:
    q, k, v = gaussian()
    v = v + 8.5
    expected, _ = oracle(q, k, v)
    plain = rmse(comfy_sage2.attention(q, k, v), expected)
    smooth = rmse(comfy_sage2.attention(q, k, v, smooth_v=True), expected)
    assert smooth < 0.2 * plain


def test_sum_of_quantized_p_cancels_a_bias_of_v() -> None:
    q, k, v = gaussian()
    v = v + 8.0  # exact in E4M3 up to the noise, so what is left is the mismatch of l
    expected, _ = oracle(q, k, v)
    as_paper, _ = reference_attention(q, k, v, ReferenceOptions())
    on_tensor_core, _ = reference_attention(q, k, v, ReferenceOptions(sum_quantized_p=True))
    assert rmse(on_tensor_core, expected) < rmse(as_paper, expected)


MEASURE = """
import resource, sys
import torch
import comfy_sage2

torch.set_num_threads(2)
q, k, v = (torch.randn(1, 1, 12_000, 64) for _ in range(3))
mask = torch.ones(1, 12_000, dtype=torch.bool)
comfy_sage2.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], mode="4b", smooth_v=True, backend="reference")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
comfy_sage2.attention(q, k, v, mode="4b", smooth_v=True, attn_mask=mask, is_causal=True, backend="reference")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_many_tokens_take_no_square_matrix() -> None:
    """One float32 score matrix alone would be 550 MiB."""
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", MEASURE], cwd=root, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 250 * 1024  # KiB; q, k, v and their quantized copies are about 60 MiB


# Tokens and heads of head_dim 128: Qwen-Image, Flux.2, Wan 1.3B and 14B, MiniMax H3 of 5, 15 and 25 s.
CALLS = [(8_192, 40), (9_216, 24), (32_760, 12), (32_760, 40), (75_600, 40), (38_010, 56), (104_050, 56), (178_000, 56)]
MULTIPROCESSORS = {"sm90": (132, 114), "sm89": (128, 24), "sm120": (170, 36), "sm80": (82, 28)}


@pytest.mark.parametrize(("tokens", "heads"), CALLS)
@pytest.mark.parametrize("mode", ["8b", "precise"])
@pytest.mark.parametrize("name", MULTIPROCESSORS)
def test_a_call_takes_little_beside_its_output(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: str, tokens: int, heads: int
) -> None:
    """By the plans of the kernels. And of each part little of the GPU is idle in the last wave of its query blocks."""
    try:
        module = loader.load(name)
    except KernelUnavailable as error:
        pytest.skip(str(error))
    form = TensorForm.contiguous(torch.Size((1, tokens, heads, 128)), torch.bfloat16, torch.device("cuda", 0))
    signature = CallSignature(AttentionOptions(mode, layout="BNHD", rotate="auto"), ANYONE, form, form, form)
    strides = tokens * heads * 128, 128, heads * 128
    rows = 192 if (name, mode) == ("sm90", "precise") else 128
    for multiprocessors in MULTIPROCESSORS[name]:
        monkeypatch.setattr(launches, "_multiprocessors", lambda device, count=multiprocessors: count)
        call = launches.Launches(module, signature, Views(strides, strides, strides, strides))
        out, allocated = form.nbytes, -(-call.workspace_bytes // (2 << 20)) * (2 << 20)  # as torch rounds it
        assert out + allocated <= max(1.12 * out, out + (64 << 20))
        of_a_part = -(-heads // len(call.parts))
        sizes = [min(of_a_part, heads - first) for first in range(0, heads, of_a_part)]
        waves, whole = (
            sum(-(-count * -(-tokens // rows) // multiprocessors) for count in counts) for counts in (sizes, [heads])
        )
        assert waves <= 1.15 * whole
