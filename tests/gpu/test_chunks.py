"""Calls that are computed in parts give the bits of the whole call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2 import attention, explain
from comfy_sage2.backends import launches
from comfy_sage2.dispatch.plan import _plan
from comfy_sage2.options import MODES

pytestmark = pytest.mark.gpu

# The last has more keys than Hopper prepares in one pass: several blocks share the statistics of a head.
SHAPES = [(2, 8, 8, 700, 700, 64), (3, 8, 2, 333, 500, 128), (1, 5, 5, 1500, 300, 128), (5, 8, 8, 200, 2300, 128)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_parts_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, mode: str, shape: tuple[int, ...], masked: bool, layout: str, fresh_seed: int
) -> None:
    batch, q_heads, kv_heads, q_length, kv_length, head_dim = shape
    q, k, v = (
        torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((q_heads, q_length), (kv_heads, kv_length), (kv_heads, kv_length))
    )
    mask = torch.rand(batch, q_heads, q_length, kv_length, device="cuda") > 0.3 if masked else None
    if layout == "BNHD":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    choices: dict[str, Any] = {"attn_mask": mask, "mode": mode, "layout": layout, "return_lse": True}
    reasons = explain(q, k, v, **choices)
    if all(reason is not None for name, reason in reasons.items() if name != "reference"):
        pytest.skip("no accelerated backend runs here")
    whole, whole_lse = attention(q, k, v, **choices)
    made = 0
    parts_of = launches.parts_of

    def counted(*arguments: Any) -> tuple[launches.Part, ...]:
        nonlocal made
        parts = parts_of(*arguments)
        made = len(parts)
        return parts

    monkeypatch.setattr(launches, "parts_of", counted)
    for heads in (1, 3):
        made = 0
        bound = heads * (q_length + 2 * kv_length) * head_dim
        monkeypatch.setattr(launches, "WORKSPACE_BOUND", bound)
        _plan.cache_clear()  # a plan holds the parts of the bound under which it was made
        out, lse = attention(q, k, v, **choices)
        assert made > 1
        assert torch.equal(out, whole) and torch.equal(lse, whole_lse)


def test_memory_stays_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "WORKSPACE_BOUND", 8 << 20)
    q = torch.randn(1, 16, 16384, 128, device="cuda", dtype=torch.bfloat16)
    if all(reason is not None for name, reason in explain(q, q, q).items() if name != "reference"):
        pytest.skip("no accelerated backend runs here")
    attention(q, q, q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, q, q)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - out.nbytes <= 8 << 20
