"""One sampling's blocks: where errors are read, what NaN does, and that nothing waits for figures."""

from __future__ import annotations

import math

import pytest
import torch

from comfy_sage2.block_mask import BlockMask
from comfy_sage2.reference.block_margins import LOSSLESS
from comfy_sage2.sparsity.controller import SparsityController, values
from comfy_sage2.sparsity.levels import LEVELS, SKIP_LEVELS
from comfy_sage2.sparsity.mask_cache import PassKey
from comfy_sage2.sparsity.thresholds import loosest

from .kept import bytes_of

BLOCKS = 6


def call(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 1, 128 * BLOCKS, 16, generator=generator) for _ in range(3)]


def without_the_last(skipped: int) -> torch.Tensor:
    """Margins of a head whose last blocks are skipped."""
    margins = torch.zeros(1, 1, BLOCKS, BLOCKS)
    margins[..., BLOCKS - skipped :] = -200.0
    return margins


def test_the_loosest_has_no_stricter_one_out_of_bound() -> None:
    found = torch.tensor([[[0.5, 0.001, 0.002, 0.2], [0.0, 0.3, 0.001, math.nan]]])
    assert loosest(found, 0.01).tolist() == [[2, 0]]


def test_lossless_takes_the_strictest_threshold_alone() -> None:
    """Here no sampled row would lose by a looser one: V is constant."""
    q, k, _ = call(0)
    v = torch.ones_like(q)
    margins = torch.full((1, 1, BLOCKS, BLOCKS), LOSSLESS)
    margins[..., 0], margins[..., 1] = 0.0, SKIP_LEVELS["fast"].ladder[1]  # type: ignore[index]
    for level, active in (("lossless", 2), ("fast", 1)):
        controller = SparsityController(SKIP_LEVELS[level])
        controller.find(0, PassKey(0), q, k, v, margins, 0.25)
        lists = controller.lists(0, PassKey(1), q, k)
        assert isinstance(lists, BlockMask) and (lists.to_dense().sum(dim=3) == active).all()


def test_a_block_with_nan_stays() -> None:
    q, k, v = call(1)
    margins = torch.full((1, 1, BLOCKS, BLOCKS), -100.0)
    margins[..., 2], margins[0, 0, 3, 4] = 0.0, math.nan
    expected = margins.isnan() | (margins == 0.0)
    controller = SparsityController(SKIP_LEVELS["lossless"])
    controller.find(0, PassKey(0), q, k, v, margins, 0.25)
    lists = controller.lists(0, PassKey(1), q, k)
    assert isinstance(lists, BlockMask) and torch.equal(lists.to_dense(), expected)


def test_each_block_of_queries_keeps_its_highest_key_block() -> None:
    """Whose scores are all below a threshold that is right for its head: its rows would be zeros.

    They are small, so that the head's error does not show them.
    """
    sharp, diffuse = 3, 2
    q, k, v = torch.zeros(1, 1, 128 * BLOCKS, 16), torch.zeros(1, 1, 128 * BLOCKS, 16), call(3)[2] / 100
    blocks = [x.unflatten(2, (BLOCKS, 128)) for x in (q, k, v)]
    blocks[0][..., 0], blocks[0][:, :, diffuse, :, 0] = 30.0, -30.0
    blocks[1][:, :, sharp, :, 0], blocks[2][:, :, sharp] = 30.0, 100.0
    scores = torch.full((1, 1, BLOCKS, BLOCKS), -100.0)
    scores[..., sharp], scores[0, 0, diffuse], scores[0, 0, diffuse, 1] = -0.1, -5.0, -4.9
    found = SparsityController(LEVELS["strong"]).find(0, PassKey(0), q, k, v, scores, 0.25)
    expected = torch.zeros(BLOCKS, BLOCKS, dtype=torch.bool)
    expected[:, sharp], expected[diffuse] = True, torch.arange(BLOCKS) == 1
    assert torch.equal(found.blocks.active()[0, 0], expected)


def test_figures_of_lists_and_of_those_that_replace_them() -> None:
    q, k, v = call(2)
    controller = SparsityController(SKIP_LEVELS["fast"])
    for step, skipped in ((0, 4), (3, 2)):
        margins = without_the_last(skipped)
        controller.find(5, PassKey(step), q, k, v, margins, 0.25)
        assert isinstance(controller.lists(5, PassKey(step + 1), q, k), BlockMask)
    figures = controller.figures[5]
    assert values(figures.computed) == [[pytest.approx(2 / 6)], [pytest.approx(4 / 6)]]
    exact = (q @ k.transpose(2, 3) * 0.25).softmax(dim=3)
    kept = exact[..., : 2 * 128]
    lost = (kept @ v[:, :, : 2 * 128]) / kept.sum(dim=3, keepdim=True) - exact @ v
    ((later,),) = values(figures.later)
    assert later > 0.1 and abs(later - (lost.abs().sum() / (exact @ v).abs().sum()).item()) < 0.1


def test_of_all_calls_of_a_step_it_is_measured_what_the_lists_until_then_would_have_cost() -> None:
    controller, margins = SparsityController(SKIP_LEVELS["fast"]), without_the_last(BLOCKS - 1)
    for step in (0, 3):
        for seed in (5, 6):
            q, k, v = call(seed)
            controller.find(0, PassKey(step), q, k, v, margins, 0.25)
    later = values(controller.figures[0].later)
    assert len(later) == 2 and min(later)[0] > 0.1


def test_what_is_forgotten_gives_way_to_what_was_known() -> None:
    q, k, v = call(7)
    controller = SparsityController(SKIP_LEVELS["fast"])
    for step, skipped in ((0, 4), (3, 2)):
        margins = without_the_last(skipped)
        controller.find(0, PassKey(step), q, k, v, margins, 0.25)
    controller.forget(PassKey(3))
    assert len(controller.figures[0].found) == 1 and not controller.figures[0].later
    lists = controller.lists(0, PassKey(3), q, k)
    assert (
        isinstance(lists, BlockMask)
        and (lists.to_dense().sum(dim=3) == 2).all()
        and controller.finds(0, PassKey(3), q, k)
    )


def test_what_a_forgotten_evaluation_added_is_gone() -> None:
    """A further prompt's blocks, found between the steps in which all are."""
    q, k, v = call(8)
    controller = SparsityController(SKIP_LEVELS["fast"])
    first, second, again = (PassKey(step, prompts=frozenset(names)) for step, names in ((0, "a"), (1, "b"), (2, "b")))
    controller.find(0, first, q, k, v, without_the_last(4), 0.25)
    before = bytes_of(controller._kept)
    controller.find(0, second, q, k, v, without_the_last(2), 0.25)
    controller.forget(second)
    assert controller.finds(0, second, q, k) and controller.finds(0, again, q, k)
    lists = controller.lists(0, first._replace(step=1), q, k)
    assert isinstance(lists, BlockMask) and (lists.to_dense().sum(dim=3) == 2).all()
    assert bytes_of(controller._kept) == before and len(controller.figures[0].found) == 1


def test_lists_that_would_not_pay_are_not_made() -> None:
    q, k, v = call(3)
    margins = torch.zeros(1, 1, BLOCKS, BLOCKS)
    margins[..., 0] = -200.0  # a sixth
    controller = SparsityController(SKIP_LEVELS["fast"])
    assert controller.finds(0, PassKey(0), q, k)
    controller.find(0, PassKey(0), q, k, v, margins, 0.25)
    assert not controller.finds(0, PassKey(1), q, k)
    assert "less than 17% of its key blocks can be skipped" in str(
        controller.lists(0, PassKey(1), q, k, least_skipped=0.17)
    )
    assert values(controller.figures[0].computed) == []
    exactly = 1.0 - torch.tensor(5 / 6).item()
    assert isinstance(controller.lists(0, PassKey(1), q, k, least_skipped=exactly), BlockMask)
    assert values(controller.figures[0].computed) == [[pytest.approx(5 / 6)]]


def test_which_calls_find_blocks() -> None:
    q, k, v = call(4)
    controller, margins = SparsityController(SKIP_LEVELS["fast"]), torch.zeros(1, 1, BLOCKS, BLOCKS)
    found = []
    for step in range(10):
        found.append(controller.finds(0, PassKey(step), q, k))
        if found[-1]:
            controller.find(0, PassKey(step), q, k, v, margins, 0.25)
    assert [step for step, finds in enumerate(found) if finds] == [0, 3, 8]
    assert controller.finds(1, PassKey(9), q, k), "another layer"
    assert controller.finds(0, PassKey(9), q[:, :, 128:], k), "another size"


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([0, 1, 2, 1, 2, 3, 2, 3, 4], [0, 3]),  # as heunpp2 looks ahead
        ([0, 1, 0, 1], [0, 0]),  # two latents, one after the other
        ([0, 1, 2, 1, 2, 1, 2], [0, 1]),
        ([0, 1, 2, 3, 1, 2], [0, 3, 1]),
    ],
    ids=str,
)
def test_a_sampler_that_goes_back_has_another_latent_unless_it_looked_ahead(steps: list[int], found: list[int]) -> None:
    q, k, v = call(4)
    controller, margins, finding = SparsityController(SKIP_LEVELS["fast"]), torch.zeros(1, 1, BLOCKS, BLOCKS), []
    for evaluation, step in enumerate(steps):
        now = PassKey(step, evaluation)
        if controller.finds(0, now, q, k):
            controller.find(0, now, q, k, v, margins, 0.25)
            finding.append(step)
    assert finding == found


def test_choices_of_another_latent_serve_no_call() -> None:
    def focused(on: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each block of queries attends to one of keys, `on` blocks behind it."""
        k = 8.0 * torch.eye(16)[:BLOCKS].repeat_interleave(128, 0).expand(1, 1, -1, -1)
        return k.roll(-128 * on, 2), k, call(9)[2]

    controller = SparsityController(LEVELS["strong"])
    before = controller.select(0, PassKey(5), *focused(1), 0.25)
    controller.select(1, PassKey(2), *focused(2), 0.25)  # back in time by three
    chosen = controller.select(0, PassKey(6), *focused(2), 0.25)
    wanted = SparsityController(LEVELS["strong"]).select(0, PassKey(6), *focused(2), 0.25)
    assert isinstance(before, BlockMask) and isinstance(chosen, BlockMask) and isinstance(wanted, BlockMask)
    assert torch.equal(chosen.lists, wanted.lists) and not torch.equal(chosen.lists, before.lists)
