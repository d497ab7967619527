"""Calls that are computed in parts give the same bits as the whole call."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from comfy_sage2 import attention, explain
from comfy_sage2.backends import launches
from comfy_sage2.dispatch.plan import _plan
from comfy_sage2.options import MODES

from .builds import assert_equal_in_threads, backend, bound, each_family

pytestmark = pytest.mark.gpu

# The last one has more keys than Hopper prepares in one pass: several thread blocks share the statistics of a head.
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
        workspace = heads * (q_length + 2 * kv_length) * head_dim
        monkeypatch.setattr(launches, "workspace_bound", lambda signature, workspace=workspace: workspace)
        _plan.cache_clear()  # a cached plan keeps the parts of an earlier bound
        out, lse = attention(q, k, v, **choices)
        assert made > 1
        assert torch.equal(out, whole) and torch.equal(lse, whole_lse)


def fused(tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v (1, N, H, 128) as views of one projection, as in models."""
    q, k, v = torch.randn(1, tokens, 3, heads, 128, device="cuda", dtype=torch.bfloat16).unbind(2)
    return q, k, v


def check_without_memory(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = fused(131_072, 4)  # the quantized tensors of one head take 48 MiB
    expected = bound(name, q, k, v, layout="BNHD").run(q, k, v)[0]
    total = torch.cuda.get_device_properties(0).total_memory
    out = None
    for room, fits in ((72 << 20, True), (2 << 20, False)):
        call = out = None  # frees the memory of the previous call before the limit is set
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + q.nbytes + room) / total)
        try:
            call = bound(name, q, k, v, layout="BNHD")
            with nullcontext() if fits else pytest.raises(torch.cuda.OutOfMemoryError):
                out = call.run(q, k, v)[0]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if fits:
            assert torch.equal(out, expected)  # outside of the limit: comparing needs memory too
    assert torch.equal(bound(name, q, k, v, layout="BNHD").run(q, k, v)[0], expected)


@each_family
def test_parts_get_smaller_without_memory(name: str, fresh_seed: int) -> None:
    """The bits stay the same. Without memory for one head, torch raises its error and the inputs do not change.

    In a process of its own, because memory that other tests left in the allocator has room between its blocks.
    """
    backend(name)  # skips the test if the module is not built for this GPU
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(check_without_memory, name, fresh_seed).result()


@each_family
def test_parts_in_two_streams_and_in_a_graph(name: str, monkeypatch: pytest.MonkeyPatch, fresh_seed: int) -> None:
    inputs = [fused(2_000, 6) for _ in range(2)]
    monkeypatch.setattr(launches, "workspace_bound", lambda signature: 1)
    calls = [bound(name, *tensors, layout="BNHD") for tensors in inputs]
    assert_equal_in_threads(lambda index: calls[index].run(*inputs[index])[0])
    expected = calls[1].run(*inputs[1])[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = calls[0].run(*inputs[0])[0]
    for tensor, other in zip(*inputs, strict=True):
        tensor.copy_(other)
    graph.replay()
    assert torch.equal(out, expected)
