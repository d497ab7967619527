"""Block masks in the kernels, against the dense call, the reference and float64, and the launches of such calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from unit.core.random_blocks import INVALID_LISTS

from comfy_sage2 import BlockMask
from comfy_sage2.backends import launches
from comfy_sage2.block_mask import blocks_of
from comfy_sage2.call.tensors import OptionalTensors

from .builds import (
    EXACT_BOUND,
    backend,
    bound,
    check,
    each_mode,
    exact,
    random_qkv,
    relative_l1,
    run,
)

pytestmark = pytest.mark.gpu

each_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])
each_order = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


@pytest.fixture(autouse=True)
def kernels_with_lists(name: str) -> None:
    backend(name)


RAGGED = (333, 700)  # 3 blocks of queries and 6 blocks of keys, the last of 77 and of 60


def lists_of(active: torch.Tensor) -> torch.Tensor:
    """The lists of the active blocks (B, Hq, Tq, Tk), each in random order, with random numbers after the entries."""
    count = active.sum(3, keepdim=True)
    order = torch.rand(active.shape, device=active.device).masked_fill(~active, 2).argsort(3)
    anything = torch.randint(-(2**15), 2**15, active.shape, device=active.device)
    entries = order.where(torch.arange(active.shape[3], device=active.device) < count, anything)
    return torch.cat((count, entries), 3).to(torch.int16)


def random_lists(
    q: torch.Tensor, k: torch.Tensor, skipped: float = 0.5, *, batch: int | None = None, heads: int | None = None
) -> torch.Tensor:
    """Random lists of blocks that leave out a share `skipped`; the first query block keeps at least one."""
    shape = (batch or q.shape[0], heads or q.shape[1], blocks_of(q.shape[2]), blocks_of(k.shape[2]))
    active = torch.rand(shape, device="cuda") >= skipped
    active[:, :, 0, 0] = True
    return lists_of(active)


def all_blocks(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return random_lists(q, k, 0.0)


def assert_same_bits(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: torch.Tensor, **call: Any
) -> None:
    """Assert that a call with lists gives the bits of the dense call."""
    out, lse = run(name, q, k, v, block_mask=block_mask, return_lse=True, **call)
    wanted, wanted_lse = run(name, q, k, v, return_lse=True, **call)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


@each_mode
@each_order
@pytest.mark.parametrize("head_dim", [40, 64, 72, 128, 200, 256])
def test_random_lists(name: str, mode: str, head_dim: int, is_causal: bool, fresh_seed: int) -> None:
    q, k, v = random_qkv((2, 3, RAGGED[0], head_dim), (2, 3, RAGGED[1], head_dim))
    check(name, q, k, v, mode, is_causal=is_causal, block_mask=random_lists(q, k))


@each_mode
@each_order
@each_head_dim
@pytest.mark.parametrize(
    "lengths", [(1, 1), (128, 128), (129, 65), (300, 64), (100, 640), (640, 100), (700, 705)], ids=str
)
def test_lengths(
    name: str, mode: str, head_dim: int, is_causal: bool, lengths: tuple[int, int], fresh_seed: int
) -> None:
    q, k, v = random_qkv((1, 2, lengths[0], head_dim), (1, 2, lengths[1], head_dim), torch.bfloat16)
    check(name, q, k, v, mode, is_causal=is_causal, block_mask=random_lists(q, k, 0.4))


@each_mode
@each_order
@each_head_dim
@pytest.mark.parametrize("mask", ["keys", "full", "additive"])
def test_lists_and_masks(name: str, mode: str, head_dim: int, is_causal: bool, mask: str, fresh_seed: int) -> None:
    q, k, v = random_qkv((2, 4, RAGGED[0], head_dim), (2, 2, RAGGED[1], head_dim))
    attn_mask = {
        "keys": torch.arange(RAGGED[1], device="cuda").lt(500).view(1, 1, 1, -1),
        "full": torch.rand(2, 4, *RAGGED, device="cuda") > 0.3,
        "additive": torch.randn(1, 4, *RAGGED, device="cuda", dtype=q.dtype),
    }[mask]
    check(name, q, k, v, mode, is_causal=is_causal, attn_mask=attn_mask, block_mask=random_lists(q, k))


@each_mode
@each_order
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, None), (None, 1)])
def test_batch_entries_and_heads_share_lists(
    name: str, mode: str, is_causal: bool, batch: int | None, heads: int | None, fresh_seed: int
) -> None:
    q, k, v = random_qkv((2, 6, 517, 128), (2, 2, 517, 128))
    blocks = random_lists(q, k, batch=batch, heads=heads)
    out, lse = run(name, q, k, v, mode=mode, is_causal=is_causal, block_mask=blocks, return_lse=True)
    own = blocks.expand(2, 6, -1, -1).contiguous()
    wanted, wanted_lse = run(name, q, k, v, mode=mode, is_causal=is_causal, block_mask=own, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    check(name, q, k, v, mode, is_causal=is_causal, block_mask=blocks)


@each_mode
@each_order
@each_head_dim
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [RAGGED, (700, 700), (300, 680), (512, 640), (2000, 4096)], ids=str)
def test_lists_of_all_blocks_give_the_bits_of_the_dense_call(
    name: str, mode: str, head_dim: int, is_causal: bool, masked: bool, lengths: tuple[int, int], fresh_seed: int
) -> None:
    q, k, v = random_qkv((2, 4, lengths[0], head_dim), (2, 2, lengths[1], head_dim), outliers=True)
    mask = torch.rand(2, 1, *lengths, device="cuda") > 0.4 if masked else None
    assert_same_bits(name, q, k, v, all_blocks(q, k), mode=mode, is_causal=is_causal, attn_mask=mask)


@each_mode
@each_order
@each_head_dim
def test_empty_lists_give_zeros(name: str, mode: str, head_dim: int, is_causal: bool, fresh_seed: int) -> None:
    q, k, v = random_qkv((2, 3, 700, head_dim), (2, 3, 650, head_dim))
    active = torch.ones(2, 3, 6, 6, dtype=torch.bool, device="cuda")
    active[:, 1, ::2] = False
    active[1, 2] = False
    call: dict[str, Any] = {"mode": mode, "is_causal": is_causal, "return_lse": True}
    smooth_v = mode != "precise"
    out, lse = run(name, q, k, v + 5, smooth_v=smooth_v, block_mask=lists_of(active), **call)
    empty = ~active.any(3).repeat_interleave(128, 2)[:, :, :700]
    assert not out[empty].any() and (lse[empty] == -torch.inf).all()
    most = torch.ones_like(active)
    most[1, 2, 0, 0] = False  # so that the kernel for lists runs
    wanted, wanted_lse = run(name, q, k, v + 5, smooth_v=smooth_v, block_mask=lists_of(most), **call)
    assert torch.equal(out[~empty], wanted[~empty]) and torch.equal(lse[~empty], wanted_lse[~empty])
    out, lse = run(name, q, k, v + 5, smooth_v=smooth_v, block_mask=lists_of(torch.zeros_like(active)), **call)
    assert not out.any() and (lse == -torch.inf).all()


@each_mode
def test_300000_queries(name: str, mode: str, fresh_seed: int) -> None:
    """2344 query blocks in each of two heads, with 40 key blocks on average: some with none, some with hundreds."""
    q, k, v = random_qkv((1, 2, 300_000, 64), (1, 2, 300_000, 64))
    share = torch.rand(1, 2, 2344, 1, device="cuda") ** 4 * 0.1 - 0.001
    blocks = lists_of(torch.rand(1, 2, 2344, 2344, device="cuda") < share)
    out, lse = run(name, q, k, v, mode=mode, block_mask=blocks, return_lse=True)
    assert torch.equal(lse.isinf().view(1, 2, -1), (blocks[..., 0] == 0).repeat_interleave(128, 2)[..., :300_000])
    for block in (0, 1, 1000, 2343):
        rows = slice(128 * block, min(128 * block + 128, 300_000))
        part = blocks[:, :, block : block + 1].contiguous()
        wanted, wanted_lse = exact(q[:, :, rows], k, v, block_mask=part)
        filled = wanted_lse.isfinite()
        assert not out[:, :, rows][~filled].any()
        if filled.any():
            assert relative_l1(out[:, :, rows][filled], wanted[filled]) <= EXACT_BOUND[mode]


@each_mode
@pytest.mark.parametrize(("bad", "clean"), [*INVALID_LISTS, ([3, 1, 2, 0], [3, 0, 1, 2])], ids=str)
def test_invalid_entries_are_left_out_and_noted(name: str, mode: str, bad: list[int], clean: list[int]) -> None:
    backend(name)
    q, k, v = random_qkv((2, 2, 100, 128), (2, 2, 300, 128))
    outs, flags = [], []
    for entries in (bad, clean):
        blocks = torch.tensor(entries, dtype=torch.int16, device="cuda").expand(2, 2, 1, -1).contiguous()
        flags.append(torch.full((1,), -7, dtype=torch.int32, device="cuda"))
        optional = OptionalTensors(block_mask=blocks, invalid_blocks=flags[-1])
        outs.append(bound(name, q, k, v, optional, mode=mode).run(q, k, v, optional)[0])
    assert torch.equal(outs[0], outs[1])
    assert [flag.item() for flag in flags] == [-7 if sorted(bad) == sorted(clean) else 1, -7]


@each_mode
def test_any_memory_as_lists_is_harmless(name: str, mode: str, fresh_seed: int) -> None:
    q, k, v = random_qkv((2, 3, 900, 64), (2, 3, 5000, 64))
    for _ in range(5):
        blocks = torch.randint(-(2**15), 2**15, (2, 3, 8, 41), device="cuda").to(torch.int16)
        blocks[:, 1, :, 1:] %= 50
        out, _ = run(name, q, k, v, mode=mode, block_mask=blocks)
        clean = lists_of(BlockMask(blocks).to_dense())
        assert torch.equal(out, run(name, q, k, v, mode=mode, block_mask=clean)[0])


@each_mode
@each_head_dim
def test_repeats_of_unequal_work_are_bit_equal(name: str, mode: str, head_dim: int, fresh_seed: int) -> None:
    """More work tiles than thread blocks, each with 0 to all key blocks."""
    q, k, v = random_qkv((2, 8, 3000, head_dim), (2, 4, 3000, head_dim))
    share = torch.rand(2, 8, 24, 1, device="cuda") * 1.2 - 0.1
    blocks = lists_of(torch.rand(2, 8, 24, 24, device="cuda") < share)
    first, first_lse = run(name, q, k, v, mode=mode, block_mask=blocks, return_lse=True)
    for _ in range(10):
        out, lse = run(name, q, k, v, mode=mode, block_mask=blocks, return_lse=True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


@each_mode
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cuda_graph_follows_its_lists(name: str, mode: str, head_dim: int) -> None:
    """Also when the lists change to leave out no block, in which case another kernel may serve the call."""
    q, k, v = random_qkv((1, 4, 3000, head_dim), (1, 4, 3000, head_dim))
    blocks = random_lists(q, k)
    run(name, q, k, v, mode=mode, block_mask=blocks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = run(name, q, k, v, mode=mode, block_mask=blocks)
    for skipped in (0.2, 0.0, 0.8, 0.0):
        blocks.copy_(random_lists(q, k, skipped))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(name, q, k, v, mode=mode, block_mask=blocks)[0])


@each_mode
@each_order
@pytest.mark.parametrize(("batch", "heads"), [(None, None), (1, None), (None, 1)])
def test_parts_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mode: str,
    is_causal: bool,
    batch: int | None,
    heads: int | None,
    fresh_seed: int,
) -> None:
    q, k, v = random_qkv((3, 8, 700, 64), (3, 2, 700, 64), torch.bfloat16)
    call: dict[str, Any] = {"mode": mode, "is_causal": is_causal, "return_lse": True}
    call["block_mask"] = random_lists(q, k, batch=batch, heads=heads)
    whole, whole_lse = run(name, q, k, v, **call)
    monkeypatch.setattr(launches, "workspace_bound", lambda signature: 3 * 700 * 64)
    out, lse = run(name, q, k, v, **call)
    assert torch.equal(out, whole) and torch.equal(lse, whole_lse)
