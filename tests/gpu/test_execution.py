"""Launches of kernels: streams, graphs, threads, offsets past 2^31 elements, repeats, work in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretended_gpu import on_gpu

from comfy_sage2.backends.module_plan import Views, plan_fields
from comfy_sage2.kernels import loader
from comfy_sage2.options import AttentionOptions

from .builds import (
    EXACT_BOUND,
    assert_equal_in_threads,
    backend,
    each_kernel,
    exact,
    random_qkv,
    relative_l1,
    run,
)

pytestmark = pytest.mark.gpu


@each_kernel
def test_repeats_are_bit_equal(name: str, mode: str) -> None:
    q, k, v = random_qkv((2, 4, 3000, 128), (2, 2, 3000, 128))
    first, first_lse = run(name, q, k, v, mode=mode, smooth_v=True, return_lse=True)
    for _ in range(5):
        out, lse = run(name, q, k, v, mode=mode, smooth_v=True, return_lse=True)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


@each_kernel
def test_side_stream(name: str, mode: str) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q, k, v = random_qkv((1, 4, 1000, 128), (1, 4, 1000, 128))
        out, _ = run(name, q, k, v, mode=mode)
    stream.synchronize()
    assert relative_l1(out, exact(q, k, v)[0]) <= EXACT_BOUND[mode]


@each_kernel
def test_cuda_graph_after_copy_and_fill(name: str, mode: str) -> None:
    """The first launch of a call may overlap with the kernel before it; in a graph that can be a copy or a fill."""
    q, k, v = random_qkv((1, 4, 700, 128), (1, 4, 700, 128))
    new_q, new_k, new_v = random_qkv((1, 4, 700, 128), (1, 4, 700, 128))
    run(name, q, k, v, mode=mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.copy_(new_q)
        k.copy_(new_k)
        v.copy_(new_v)
        copied, _ = run(name, q, k, v, mode=mode)
        v.zero_()
        filled, _ = run(name, q, k, v, mode=mode)
    for tensor in (copied, filled):
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = run(name, new_q, new_k, new_v, mode=mode)
    assert torch.equal(copied, expected)
    assert torch.equal(filled, torch.zeros_like(filled))


@each_kernel
def test_two_threads(name: str, mode: str) -> None:
    inputs = [random_qkv((1, 4, 1500, 128), (1, 4, 1500, 128)) for _ in range(2)]
    assert_equal_in_threads(lambda index: run(name, *inputs[index], mode=mode)[0])


@each_kernel
def test_second_gpu(name: str, mode: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device on this machine")
    q, k, v = random_qkv((1, 4, 700, 128), (1, 4, 700, 128))
    expected, _ = run(name, q, k, v, mode=mode)
    out, _ = run(name, *(tensor.to("cuda:1") for tensor in (q, k, v)), mode=mode)
    assert out.device.index == 1
    assert torch.equal(out.to("cuda:0"), expected)


def _fused_projection(tokens: int, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """q, k and v as BHND views of one random projection (1, tokens, 3, heads, head_dim)."""
    fused = torch.empty(1, tokens, 3, heads, head_dim, device="cuda", dtype=torch.float16).normal_()
    return fused.permute(2, 0, 3, 1, 4).unbind(0)


def _check_rows(
    mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Compare random rows and the last ones with float64."""
    tokens = q.shape[2]
    rows = torch.cat((torch.randint(tokens, (100,)), torch.arange(tokens - 100, tokens))).to("cuda")
    wanted, wanted_lse = exact(q[:, :, rows], k, v)
    assert relative_l1(out[:, :, rows], wanted) <= EXACT_BOUND[mode]
    assert (lse[:, :, rows] - wanted_lse).abs().max() < 0.1


@pytest.mark.slow
@each_kernel
def test_300000_tokens_with_offsets_past_32_bits(name: str, mode: str) -> None:
    # The last of 60 heads: its last token is 300,000 * 3 * 60 * 64 = 3.5e9 elements from the start.
    q, k, v = (tensor[:, -1:] for tensor in _fused_projection(300_000, 60, 64))
    out, lse = run(name, q, k, v, mode=mode, return_lse=True)
    _check_rows(mode, q, k, v, out, lse)


@pytest.mark.slow
def test_300000_tokens_of_60_heads() -> None:
    """The output and each part of the workspace also exceed 2^31 elements. On Hopper only: it takes 3e15 operations."""
    backend("sm90")
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of free GPU memory")
    q, k, v = _fused_projection(300_000, 60, 128)
    out, lse = run("sm90", q, k, v, return_lse=True)
    for head in (0, 31, 59):
        heads = slice(head, head + 1)
        _check_rows("8b", q[:, heads], k[:, heads], v[:, heads], out[:, heads], lse[:, heads])


@pytest.mark.parametrize("tokens", [75_600, 400_000])
@pytest.mark.parametrize("name", ["sm90", "sm89"])
def test_workspace_is_bounded(name: str, tokens: int) -> None:
    """Per 6 bytes of q, k and v in 16 bits: 3 and scales in 8b; in precise 2 on Hopper, which reads V in place, else 4.

    4b adds the means of Q's blocks, and at most 256 MiB for smooth Q's correction, which for 75,600 tokens would take
    7 GB.
    """
    backend(name)
    strides = (tokens * 40 * 128, 128, 40 * 128)
    views = Views(strides, strides, strides, strides)
    sizes: dict[str, Any] = {"q_heads": 40, "kv_heads": 40, "q_length": tokens, "kv_length": tokens}
    needed = {}
    for mode in loader.load(name).modes:
        signature = on_gpu((9, 0), AttentionOptions(mode), **sizes)
        needed[mode] = loader.load(name).plan(**plan_fields(signature, views, 1, 40)).workspace_bytes
    block_means = 40 * (tokens // 128 + 1) * 128 * 4
    assert needed["8b"] <= 0.55 * 6 * tokens * 40 * 128
    assert needed["4b"] <= needed["8b"] + (256 << 20) + block_means
    assert needed["precise"] <= (0.35 if name == "sm90" else 0.72) * 6 * tokens * 40 * 128


@pytest.mark.parametrize("name", ["sm90", "sm89"])
def test_smoothed_queries_in_parts(name: str) -> None:
    """The correction of 2 * 24 heads with 40,000 keys exceeds its share of the workspace: several launches."""
    q, k, v = random_qkv((2, 24, 5120, 64), (2, 2, 40_000, 64))
    out, lse = run(name, q, k, v, mode="4b", return_lse=True)
    for batch, head in ((0, 0), (0, 23), (1, 0), (1, 23)):
        kv_head = head // 12
        part = q[batch, head, None, None], k[batch, kv_head, None, None], v[batch, kv_head, None, None]
        wanted, wanted_lse = run(name, *part, mode="4b", return_lse=True)
        assert torch.equal(out[batch, head], wanted[0, 0])
        assert torch.equal(lse[batch, head], wanted_lse[0, 0])
