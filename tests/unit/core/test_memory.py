"""What a call takes beside its output: the reference O(block), kernels little of the output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comfy_sage2.backends import launches
from comfy_sage2.backends.module_plan import Views
from comfy_sage2.call.signature import ANYONE, CallSignature, TensorForm
from comfy_sage2.kernels import loader
from comfy_sage2.kernels.bundled import KernelUnavailable
from comfy_sage2.options import AttentionOptions

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
