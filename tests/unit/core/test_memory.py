"""Memory is O(block): at N = 20,000 one float32 score matrix alone would be 1.5 GiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import resource, sys
import torch
import comfy_sage2

torch.set_num_threads(2)
q, k, v = (torch.randn(1, 1, 20_000, 64) for _ in range(3))
mask = torch.ones(1, 20_000, dtype=torch.bool)
comfy_sage2.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], mode="4b", smooth_v=True, backend="reference")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
comfy_sage2.attention(q, k, v, mode="4b", smooth_v=True, attn_mask=mask, is_causal=True, backend="reference")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_twenty_thousand_tokens_take_no_square_matrix() -> None:
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", MEASURE], cwd=root, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 250 * 1024  # KiB; q, k, v and their quantized copies are about 60 MiB
