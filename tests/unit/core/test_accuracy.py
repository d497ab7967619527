"""The accuracy that the paper claims for each choice, on fresh random inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import assert_near, cosine, oracle, rmse

import comfy_sage2
from comfy_sage2.backends import launches
from comfy_sage2.backends.module_plan import Views
from comfy_sage2.call.signature import ANYONE, CallSignature, TensorForm
from comfy_sage2.kernels import loader
from comfy_sage2.kernels.bundled import KernelUnavailable
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP32
from comfy_sage2.quantize.formats import FP32
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

pytestmark = pytest.mark.slow


def gaussian(length: int = 1024, heads: int = 4, head_dim: int = 128) -> Any:
    return tuple(torch.randn(1, heads, length, head_dim) for _ in range(3))


def test_8b_criterion() -> None:
    # Enough heads that all draws give the same figure: with eight it varies by one hundredth.
    inputs = gaussian(4096, 16)
    # torch's own attention in float64: the oracle's score matrices would take a gigabyte here.
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in inputs))
    out = comfy_sage2.attention(*inputs, mode="8b", backend="reference")
    assert cosine(out, expected) >= 0.9992
    assert_near(out, expected, "8b", 0.039)


def test_full_precision_options_are_plain_attention() -> None:
    q, k, v = gaussian(300)
    options = ReferenceOptions(
        qk_format=FP32, smooth_q=True, smooth_v=True, p_format=FP32, v_format=FP32, accumulator=ACCUMULATE_FP32
    )
    out, lse = reference_attention(q + 3, k + 4, v + 5, options)
    expected, expected_lse = oracle(q + 3, k + 4, v + 5)
    torch.testing.assert_close(out.double(), expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


def test_sum_of_quantized_p_cancels_a_bias_of_v() -> None:
    q, k, v = gaussian()
    v = v + 8.0  # E4M3 holds 8.0 exactly: what remains is the mismatch of the row sum
    expected, _ = oracle(q, k, v)
    as_paper, _ = reference_attention(q, k, v, ReferenceOptions())
    on_tensor_core, _ = reference_attention(q, k, v, ReferenceOptions(sum_quantized_p=True))
    assert rmse(on_tensor_core, expected) < 0.8 * rmse(as_paper, expected)


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
def test_long_calls_never_hold_the_whole_score_matrix() -> None:
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
def test_a_call_takes_little_memory_besides_its_output(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: str, tokens: int, heads: int
) -> None:
    """By the kernels' plans. Little of the GPU is idle in the last wave of a part's query blocks, too."""
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
        heads_of_part = -(-heads // len(call.parts))
        sizes = [min(heads_of_part, heads - first) for first in range(0, heads, heads_of_part)]
        waves, whole = (
            sum(-(-count * -(-tokens // rows) // multiprocessors) for count in counts) for counts in (sizes, [heads])
        )
        assert waves <= 1.15 * whole
