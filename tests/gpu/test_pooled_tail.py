"""The kernels that add the tail of a call with block lists, against the reference in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from comfy_sage2 import BlockMask
from comfy_sage2.backends.block_kernels import add_tail_
from comfy_sage2.block_mask import blocks_of
from comfy_sage2.reference.pooled_tail import add_pooled_tail_ as reference_

from .builds import assert_equal_in_threads, each_family, module_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def module(name: str) -> ModuleType:
    return module_of(name)


def random_call(
    heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, batch: int = 2
) -> tuple[torch.Tensor, ...]:
    """q, k with an offset common to all tokens, v, a plausible output and LSE of a call with lists, and a mask."""
    q = torch.randn(batch, heads[0], lengths[0], head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, heads[1], lengths[1], head_dim, device="cuda", dtype=dtype) for _ in range(2))
    k += torch.randn(head_dim, device="cuda").to(dtype)
    out = torch.randn_like(q)
    lse = (
        torch.randn(q.shape[:3], device="cuda")
        + 4
        + (q.float() @ k.float().mean(2).repeat_interleave(heads[0] // heads[1], 1)[..., None])[..., 0] * head_dim**-0.5
    )
    active = torch.rand(batch, heads[0], blocks_of(lengths[0]), blocks_of(lengths[1]), device="cuda") < 0.4
    active[0, 0] = True
    return q, k, v, out, lse, active


def assert_near_reference(
    module: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    active: torch.Tensor,
) -> None:
    scale = q.shape[3] ** -0.5
    before = [x.clone() for x in (q, k, v)]
    wanted, wanted_lse = out.double(), lse.double()
    reference_(q.double(), k.double(), v.double(), wanted, wanted_lse, active, scale=scale)
    full = active.all(3).expand(*q.shape[:2], -1).repeat_interleave(128, 2)[..., : q.shape[2]]
    untouched = out[full].clone()
    add_tail_(module, q, k, v, out, lse, BlockMask.from_dense(active).lists, scale)
    assert torch.equal(out[full], untouched)
    assert (out.double() - wanted).norm() / wanted.norm() < 6e-3
    assert (out.double() - wanted).abs().max() < 0.05
    assert (lse.double() - wanted_lse).abs().max() < 0.02
    assert all(torch.equal(*pair) for pair in zip(before, (q, k, v), strict=True))


@each_family
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 72, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (333, 2100), (2049, 700), (1023, 9000)], ids=str)
def test_tail_agrees_with_the_reference(
    module: ModuleType, head_dim: int, dtype: torch.dtype, lengths: tuple[int, int], fresh_seed: int
) -> None:
    assert_near_reference(module, *random_call((4, 2), lengths, head_dim, dtype))


@each_family
@pytest.mark.parametrize("shared", [(1, 1), (1, 4), (2, 1)], ids=str)
def test_batch_entries_and_heads_share_lists(module: ModuleType, shared: tuple[int, int], fresh_seed: int) -> None:
    *tensors, active = random_call((4, 4), (700, 900), 64, torch.bfloat16)
    q, k, v, out, lse = tensors
    assert_near_reference(module, q, k, v, out, lse, active[-shared[0] :, -shared[1] :].contiguous())


@each_family
def test_empty_lists_and_strided_views(module: ModuleType, fresh_seed: int) -> None:
    q, k, v, out, lse, active = random_call((3, 3), (700, 900), 64, torch.bfloat16)
    active[1, 1] = False
    lse[1, 1], out[1, 1] = -torch.inf, 0
    packed = torch.stack([x.transpose(1, 2) for x in (q, out)], 2)
    q, out = (packed[:, :, i].transpose(1, 2) for i in range(2))
    k, v = (torch.stack((x, x), 3)[:, :, :, 1] for x in (k, v))
    assert_near_reference(module, q, k, v, out, lse, active)


@each_family
def test_graphs_and_threads(module: ModuleType, fresh_seed: int) -> None:
    q, k, v, out, lse, active = random_call((4, 4), (3000, 3000), 128, torch.bfloat16)
    lists = BlockMask.from_dense(active).lists

    def corrected(given: torch.Tensor) -> torch.Tensor:
        copy, copy_of_lse = given.clone(), lse.clone()
        add_tail_(module, q, k, v, copy, copy_of_lse, lists, 128**-0.5)
        return copy

    wanted = corrected(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = corrected(out)
    graph.replay()
    assert torch.equal(replayed, wanted) and not torch.equal(replayed, out)
    outputs = [out, torch.randn_like(out)]
    assert_equal_in_threads(lambda index: corrected(outputs[index]))


@each_family
def test_300000_keys(module: ModuleType, fresh_seed: int) -> None:
    assert_near_reference(module, *random_call((1, 1), (500, 300_000), 128, torch.bfloat16, batch=1))


@each_family
@pytest.mark.sanitizer
def test_small_tail(module: ModuleType, fresh_seed: int) -> None:
    assert_near_reference(module, *random_call((2, 1), (200, 300), 64, torch.bfloat16, batch=1))
