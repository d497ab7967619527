"""Blocks that calls chose for themselves: which calls they serve, for how long, and what is thrown away."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.sparsity.mask_cache import PassKey
from comfy_sage2.sparsity.selections import SelectionKey, Selections

from .kept import bytes_of

CALL = SelectionKey(2, (2, 3, 640, 64), 1100, torch.device("cpu"), ("a", "b"), frozenset())


def random_blocks(seed: int) -> torch.Tensor:
    return torch.rand(2, 3, 5, 9, generator=torch.Generator().manual_seed(seed)) < 0.3


def test_a_choice_serves_the_entries_of_its_batch_for_so_many_steps(fresh_seed: int) -> None:
    kept, active = Selections(3), random_blocks(fresh_seed)
    chosen = kept.keep(CALL, PassKey(4), active)
    assert torch.equal(chosen.blocks.active(), active)
    torch.testing.assert_close(chosen.blocks.shares, active.float().mean(dim=(0, 2, 3)))
    assert chosen.blocks.skipped_share() == pytest.approx(1.0 - active.float().mean().item())
    for step, serves in ((4, False), (5, True), (6, True), (7, False), (3, False)):
        found = kept.serving(CALL, PassKey(step))
        assert (found is not None) == serves
        assert found is None or torch.equal(found.blocks.active(), active)
    assert kept.serving(CALL, PassKey(4, evaluation=1)) is not None, "a further evaluation of the step"
    assert bytes_of(kept) == 2 * 3 * 5 * 2


@pytest.mark.parametrize(
    "other",
    [
        {"layer": 3},
        {"q_shape": (1, 3, 640, 64)},
        {"kv_length": 1101},
        {"device": torch.device("meta")},
        {"entries": ("b", "a")},
        {"changes": frozenset({("lora", 0.5)})},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_calls_choose_for_themselves(other: dict[str, Any], fresh_seed: int) -> None:
    kept = Selections(3)
    kept.keep(CALL, PassKey(4), random_blocks(fresh_seed))
    assert kept.serving(CALL._replace(**other), PassKey(5)) is None


def test_calls_of_one_moment_that_look_the_same_share_a_union_later(fresh_seed: int) -> None:
    first, second = random_blocks(fresh_seed), random_blocks(fresh_seed + 1)
    kept = Selections(3)
    for active in (first, second):
        assert torch.equal(kept.keep(CALL, PassKey(0), active).blocks.active(), active)
    found = kept.serving(CALL, PassKey(1))
    assert found is not None and torch.equal(found.blocks.active(), first | second)


def test_what_is_replaced_is_known_until_then_and_what_is_old_goes(fresh_seed: int) -> None:
    kept, other = Selections(3), CALL._replace(entries=("c", "d"))
    for call in (CALL, other):
        kept.keep(call, PassKey(0), random_blocks(fresh_seed))
    for call in (CALL, other):
        assert kept.previous(call, PassKey(3)) is not None
        kept.keep(call, PassKey(3), random_blocks(fresh_seed))
        assert kept.previous(call, PassKey(3)) is None
    one = bytes_of(kept) // 2
    for step in range(4, 30):  # context windows that are others in each step
        kept.keep(CALL._replace(entries=(str(step),)), PassKey(step), random_blocks(fresh_seed))
    assert bytes_of(kept) <= 6 * one
    kept.clear()
    assert bytes_of(kept) == 0


def test_what_a_repeated_pass_chose_is_forgotten(fresh_seed: int) -> None:
    kept, other = Selections(3), CALL._replace(layer=4)
    kept.keep(CALL, PassKey(0), random_blocks(fresh_seed))
    kept.keep(other, PassKey(1), random_blocks(fresh_seed))
    kept.forget(PassKey(1))
    assert kept.serving(CALL, PassKey(2)) is not None and kept.serving(other, PassKey(2)) is None
