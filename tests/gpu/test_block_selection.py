"""The kernels that score and list key blocks, against the reference in float64."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from comfy_sage2 import BlockMask
from comfy_sage2.backends.block_kernels import block_lists, block_scores
from comfy_sage2.block_mask import blocks_of
from comfy_sage2.reference import block_scores as reference

from .builds import assert_equal_in_threads, each_family, module_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def module(name: str) -> ModuleType:
    return module_of(name)


def structured(
    shape: tuple[int, int, int, int], dtype: torch.dtype, nats: float = 8.0, *, seed: int = 0
) -> torch.Tensor:
    """Tokens that change slowly along a head, with noise. Q and K of one seed are close where their positions are
    close, with scores of about `nats` at a softmax scale of 1 / sqrt(D)."""
    length, head_dim = shape[2:]
    generator = torch.Generator(device="cuda").manual_seed(seed)
    frequency = torch.randn(1, 1, head_dim // 2, device="cuda", generator=generator) * 0.01
    phase = torch.arange(length, device="cuda").view(1, -1, 1) * frequency
    waves = torch.cat((phase.cos(), phase.sin()), -1)[None] * math.sqrt(nats * 2 / math.sqrt(head_dim))
    return (waves + 0.7 * torch.randn(shape, device="cuda")).to(dtype)


def assert_near_reference(
    module: ModuleType, q: torch.Tensor, k: torch.Tensor, scale: float, *, block_means: bool = False
) -> None:
    """Scores of blocks with any probability are within the error of bf16 means; the shares of each row add up to 1."""
    scores = block_scores(module, q, k, scale, block_means=block_means)
    assert scores.shape == (*q.shape[:2], blocks_of(q.shape[2]), blocks_of(k.shape[2]))
    assert scores.dtype == torch.float32 and not scores.isnan().any() and scores.min() >= -126
    wanted = reference.block_scores(q.double(), k.double(), scale=scale, block_means=block_means)
    shares = scores.double().exp2()
    assert (shares.sum(3) - 1).abs().max() < 5e-3  # the error of bf16 sums
    matters = wanted > -20
    assert (scores.double() - wanted)[matters].abs().max() < 0.1
    assert (shares - wanted.exp2()).abs().sum(3).max() < 0.02


@each_family
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 72, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (333, 2100), (2049, 700), (1023, 4097)], ids=str)
def test_block_scores_agree_with_the_reference(
    module: ModuleType, head_dim: int, dtype: torch.dtype, lengths: tuple[int, int], fresh_seed: int
) -> None:
    q = structured((2, 4, lengths[0], head_dim), dtype)
    k = structured((2, 2, lengths[1], head_dim), dtype) + 2 * torch.randn(head_dim, device="cuda").to(dtype)
    assert_near_reference(module, q, k, head_dim**-0.5)
    assert_near_reference(module, q, k, head_dim**-0.5, block_means=True)


@each_family
@pytest.mark.parametrize("nats", [1.0, 60.0, 2000.0])
def test_scores_that_grow_along_the_keys(module: ModuleType, nats: float, fresh_seed: int) -> None:
    """The kernel must raise each row's base, again and again where scores are large."""
    direction = torch.randn(128, device="cuda")
    direction /= direction.norm()
    rise = torch.linspace(-1, 1, 5000, device="cuda")[:, None] * direction
    q = (torch.rand(1, 2, 600, 1, device="cuda") + 0.5) * direction
    k = (nats * rise)[None, None] + 0.02 * torch.randn(1, 2, 5000, 128, device="cuda")
    for tensor in (k, k.flip(2)):
        scores = block_scores(module, q, tensor, 1.0)
        wanted = reference.block_scores(q.bfloat16().double(), tensor.double(), scale=1.0)
        assert not scores.isnan().any()
        assert (scores.double().exp2() - wanted.exp2()).abs().sum(3).max() < 0.02 + nats * 2e-2


@each_family
def test_strided_views(module: ModuleType, fresh_seed: int) -> None:
    packed = structured((2, 3 * 5, 1111, 64), torch.bfloat16).transpose(1, 2).contiguous().view(2, 1111, 3, 5, 64)
    q, k = (packed[:, :, i].transpose(1, 2) for i in range(2))
    scores = block_scores(module, q, k, 0.125)
    assert torch.equal(scores, block_scores(module, q.contiguous(), k.contiguous(), 0.125))
    assert_near_reference(module, q, k, 0.125)


@each_family
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_query_that_is_not_finite_makes_its_block_nan(module: ModuleType, bad: float, fresh_seed: int) -> None:
    q, k = (structured((1, 2, 700, 64), torch.bfloat16) for _ in range(2))
    q[0, 0, 300, 5] = bad
    scores = block_scores(module, q, k, 0.125)
    assert scores[0, 0, 2].isnan().all() and scores.isnan().sum() == scores.shape[3]


@each_family
def test_nan_of_a_key_makes_its_head_nan(module: ModuleType, fresh_seed: int) -> None:
    q, k = (structured((1, 2, 700, 64), torch.bfloat16) for _ in range(2))
    k[0, 1, 699, 0] = math.nan
    scores = block_scores(module, q, k, 0.125)
    assert scores[0, 1].isnan().all() and not scores[0, 0].isnan().any()


@each_family
def test_inputs_stay_and_runs_are_equal_bit_by_bit(module: ModuleType, fresh_seed: int) -> None:
    q, k = (structured((1, 8, 9000, 128), torch.bfloat16) for _ in range(2))
    before = q.clone(), k.clone()
    first = block_scores(module, q, k, 128**-0.5)
    for _ in range(3):
        assert torch.equal(block_scores(module, q, k, 128**-0.5), first)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def random_scores(*shape: int) -> torch.Tensor:
    scores = torch.randn(shape, device="cuda").mul_(4).round_()  # with ties
    scores[torch.rand(shape, device="cuda") < 0.01] = math.nan
    scores[torch.rand(shape, device="cuda") < 0.01] = -math.inf
    return torch.where(scores == 0, torch.where(torch.rand(shape, device="cuda") < 0.5, 0.0, -0.0), scores)


@each_family
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 31), (1, 2, 40, 591), (3, 2, 7, 1030), (1, 1, 2, 32767)])
@pytest.mark.parametrize("kept", [False, True])
def test_block_lists_agree_with_the_reference(
    module: ModuleType, shape: tuple[int, int, int, int], kept: bool, fresh_seed: int
) -> None:
    scores = random_scores(*shape)
    always = torch.rand(shape[3], device="cuda") < 0.1 if kept else None
    dense = torch.rand(shape[2], device="cuda") < 0.3 if kept else None
    threshold = torch.randn(shape[:2], device="cuda") * 4
    threshold[0, 0] = math.inf
    choices: list[dict[str, Any]] = [{"threshold": threshold}]
    choices += [{"count": count} for count in {1, shape[3], -(-shape[3] // 5), max(1, shape[3] - 1)}]
    for choice in choices:
        if "threshold" in choice:
            active = ~(scores <= threshold[..., None, None])
        else:
            active = reference.highest_blocks(scores, choice["count"])
        if always is not None and dense is not None:
            active = active | always | dense[:, None]
        mask = BlockMask(block_lists(module, scores, always=always, dense=dense, **choice))
        mask.check()
        assert torch.equal(mask.to_dense(), active)
        assert torch.equal(mask.lists[..., 0], active.sum(3).short())


@each_family
def test_graphs_and_threads(module: ModuleType, fresh_seed: int) -> None:
    q, k = (structured((1, 4, 3000, 128), torch.bfloat16) for _ in range(2))

    def select() -> torch.Tensor:
        scores = block_scores(module, q, k, 128**-0.5)
        lists = block_lists(module, scores, count=5)
        return BlockMask(lists).to_dense()

    wanted = select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        active = select()
    q.copy_(structured((1, 4, 3000, 128), torch.bfloat16, seed=1))
    graph.replay()
    assert torch.equal(active, select()) and not torch.equal(active, wanted)
    queries = [structured((1, 4, 3000, 128), torch.bfloat16) for _ in range(2)]
    assert_equal_in_threads(lambda index: block_scores(module, queries[index], k, 128**-0.5))


@each_family
def test_300000_keys(module: ModuleType, fresh_seed: int) -> None:
    q, k = structured((1, 1, 2000, 128), torch.bfloat16), structured((1, 1, 300_000, 128), torch.bfloat16)
    assert_near_reference(module, q, k, 128**-0.5)


@each_family
@pytest.mark.sanitizer
def test_small_choice(module: ModuleType, fresh_seed: int) -> None:
    q, k = structured((1, 2, 200, 64), torch.bfloat16), structured((1, 1, 300, 64), torch.bfloat16)
    scores = block_scores(module, q, k, 0.125)
    lists = block_lists(module, scores, count=2)
    assert (lists[..., 0] == 2).all()
