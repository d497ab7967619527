"""The block choices of one sampling: which calls they serve, for how long, when they are dropped, and figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comfy_sage2.sparsity import levels
from comfy_sage2.sparsity.choices import BlockChoices, ChoiceKey, Moment, values
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import LEVELS, Level
from comfy_sage2.sparsity.packed_blocks import Blocks, KeptBlocks

BLOCKS = 6
CPU = torch.device("cpu")


def attending(shift: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a head: each query block attends to one key block, `shift` blocks after it."""
    k = 8.0 * torch.eye(16)[:BLOCKS].repeat_interleave(128, 0).expand(batch, 1, -1, -1)
    v = torch.randn(batch, 1, 128 * BLOCKS, 16, generator=torch.Generator().manual_seed(shift))
    return k.roll(-128 * shift, 2), k, v


def attended(shift: int) -> torch.Tensor:
    """The active blocks of such a call, one for each query block."""
    return torch.eye(BLOCKS, dtype=torch.bool).roll(shift, 1)


class Sampling:
    """The calls of one sampling, with its `BlockChoices`."""

    def __init__(self) -> None:
        self.choices = BlockChoices(LEVELS["strong"])

    def call(
        self, step: int, shift: int, evaluation: int = 0, layer: int = 0, least_skipped: float = 0.0, **key: Any
    ) -> torch.Tensor | None:
        """The active blocks, bool (BLOCKS, BLOCKS), of a call whose queries attend to keys `shift` blocks later."""
        q, k, v = attending(shift)
        blocks = self.choices.blocks(
            ChoiceKey(layer, tuple(q.shape), k.shape[2], q.device)._replace(**key),
            Moment(step, evaluation),
            Inputs(q, k, v, 0.25),
            least_skipped=least_skipped,
        )
        return None if blocks is None else blocks.mask.to_dense()[0, 0]

    def serves(self, step: int, shift: int = 1, **call: Any) -> bool:
        """Whether an earlier choice serves this call."""
        figures = self.choices.figures[call.get("layer", 0)]
        before = len(figures.errors)
        active = self.call(step, shift, **call)
        assert active is not None and (active | ~attended(shift)).all(), "it must compute all that it attends to"
        return len(figures.errors) == before


def test_levels_are_bounds_of_relative_l2_or_shares() -> None:
    """Workflows name the levels."""
    bounds = {"light": 0.02, "medium": 0.05, "strong": 0.1}
    shares = {"draft 20 %": 0.2, "draft 10 %": 0.1}
    expected = {name: Level(bound=bound, tail=True) for name, bound in bounds.items()}
    assert expected | {name: Level(share=share, tail=True) for name, share in shares.items()} == LEVELS


@pytest.mark.parametrize(
    ("step", "evaluation", "serves"),
    [(4, 0, False), (4, 1, True), (5, 0, True), (6, 0, False), (9, 0, False)],
    ids=["another call of its moment", "a later evaluation", "the next step", "the step after that", "much later"],
)
def test_a_choice_serves_its_step_and_the_next_one(step: int, evaluation: int, serves: bool) -> None:
    sampling = Sampling()
    assert not sampling.serves(4)
    assert sampling.serves(step, evaluation=evaluation) == serves


@pytest.mark.parametrize("moment", [{"step": 5}, {"step": 4, "evaluation": 1}], ids=str)
def test_an_unannounced_jump_of_the_latent_causes_new_choices_in_all_layers(moment: dict[str, int]) -> None:
    """The first call that a choice would serve detects it, in any layer. Drift is not a jump."""
    sampling = Sampling()
    for layer in range(4):
        assert not sampling.serves(4, layer=layer)
    assert not any(sampling.serves(**moment, shift=2, layer=layer) for layer in (2, 3, 0, 1))
    assert all(sampling.serves(6, shift=2, layer=layer, evaluation=2) == (moment["step"] == 5) for layer in range(4))
    jumped = sampling.choices.figures[2].outdated
    assert [of.step for of, _ in jumped][:1] == [moment["step"]] and jumped[0][1].item() > 0.1


@pytest.mark.parametrize(
    ("steps", "chosen", "replaced"),
    [
        ([0, 1, 2, 1, 2, 3, 2, 3, 4], [0, 2, 1, 3, 2, 4], 5),  # as heunpp2 looks ahead
        ([0, 1, 0, 1], [0, 0], 0),  # two latents in succession
        ([0, 1, 2, 1, 2, 1, 2], [0, 2, 1, 1], 2),
        ([0, 1, 2, 3, 1, 2], [0, 2, 1], 1),
    ],
    ids=str,
)
def test_a_sampler_that_goes_back_has_a_new_latent_unless_it_looked_ahead(
    steps: list[int], chosen: list[int], replaced: int
) -> None:
    """A choice never replaces one of another latent."""
    sampling = Sampling()
    for evaluation, step in enumerate(steps):
        sampling.call(step, 1, evaluation=evaluation)
    figures = sampling.choices.figures[0]
    assert [moment.step for moment, _ in figures.errors] == chosen and len(figures.outdated) == replaced


def test_blocks_of_another_latent_serve_no_call() -> None:
    sampling = Sampling()
    sampling.call(5, 1)
    sampling.call(2, 2, layer=1)  # three steps back
    assert not sampling.serves(6, 2)


def test_a_repeated_moment_is_forgotten_with_its_figures() -> None:
    sampling = Sampling()
    sampling.call(0, 1)
    sampling.call(1, 1, layer=4)
    sampling.choices.forget(Moment(1))
    assert sampling.serves(1) and not sampling.serves(2, layer=4)
    assert [len(sampling.choices.figures[layer].computed) for layer in (0, 4)] == [2, 1]


def test_a_mask_of_an_earlier_step_that_would_not_pay_off_is_not_made() -> None:
    sampling = Sampling()
    skipped = 1.0 - torch.tensor(1 / BLOCKS).item()
    assert sampling.call(0, 1, least_skipped=0.99) is not None, "a call that chooses does not wait"
    assert sampling.call(1, 1, least_skipped=skipped + 1e-6) is None
    assert len(sampling.choices.figures[0].computed) == 1
    assert sampling.call(1, 1, least_skipped=skipped) is not None


def test_figures_of_choices_and_of_replaced_choices() -> None:
    sampling = Sampling()
    for step, shift in ((0, 1), (1, 1), (2, 2)):
        sampling.call(step, shift)
    figures = sampling.choices.figures[0]
    assert values(figures.computed) == [[pytest.approx(1 / BLOCKS)]] * 3
    assert len(figures.errors) == 2 and max(values(figures.errors))[0] < 0.1
    ((outdated,),) = values(figures.outdated)
    q, k, v = attending(2)
    of_other_block = (q @ k.mT * 0.25).masked_fill(
        ~attended(1).repeat_interleave(128, 0).repeat_interleave(128, 1), -1e9
    )
    exact = (q @ k.mT * 0.25).softmax(3) @ v
    lost = of_other_block.softmax(3) @ v - exact
    assert abs(outdated - (lost.norm() / exact.norm()).item()) < 0.2 < outdated


def test_a_figure_of_several_entries_is_the_largest_of_each_head() -> None:
    moment, of_entries = Moment(3), torch.tensor([[0.1, 0.4, 0.2], [0.3, math.nan, 0.1]])
    first, second, third = values([(moment, of_entries), (moment, of_entries.flip(0)), (moment, of_entries[:1])])
    for both in (first, second):
        assert both == pytest.approx([0.3, math.nan, 0.2], nan_ok=True)
    assert third == pytest.approx([0.1, 0.4, 0.2])
    assert values([(moment, of_entries > 0.35), (moment, of_entries[0])])[0] == [0.0, 1.0, 0.0]


def test_old_choices_are_dropped_so_that_moving_windows_do_not_fill_memory() -> None:
    sampling = Sampling()
    for step in range(9):
        sampling.call(step, 1, entries=(str(step),))
    assert len(sampling.choices._choices[0]) <= 4
    sampling.choices.clear()
    assert not sampling.choices._choices and len(sampling.choices.figures[0].computed) == 9


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 32, 133])
def test_packed_blocks_survive_a_round_trip(blocks: int, fresh_seed: int) -> None:
    active = torch.rand(2, 3, blocks, blocks, generator=torch.Generator().manual_seed(fresh_seed)) < 0.3
    by_tail = torch.tensor([[False, True, False], [False] * 3])
    for given in (None, by_tail, torch.zeros_like(by_tail)):
        packed = Blocks.of(active, given)
        assert torch.equal(packed.active(), active) and packed.by_tail is given
        kept = KeptBlocks(packed, active.sum(dim=3).short(), torch.zeros(2, 3))
        assert kept.has_tail() == (given is by_tail)
    torch.testing.assert_close(kept.shares, active.float().mean(dim=(0, 2, 3)))
    assert kept.skipped_share() == pytest.approx(1.0 - active.float().mean().item())


@pytest.mark.parametrize("level", ["draft 20 %", "strong"])
def test_short_calls_by_a_bound_have_no_tail(level: str) -> None:
    q, k, v = (torch.randn(1, 2, 128 * BLOCKS, 16) for _ in range(3))
    choices = BlockChoices(LEVELS[level])
    blocks = choices.blocks(ChoiceKey(0, tuple(q.shape), k.shape[2], q.device), Moment(0), Inputs(q, k, v, 0.25))
    assert blocks is not None and BLOCKS < levels.LEAST_BLOCKS_WITH_TAIL
    assert (blocks.tail_lists is None) == (level == "strong")
