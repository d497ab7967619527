"""Blocks that are kept between steps."""

from __future__ import annotations

import pytest
import torch

from comfy_sage2.sparsity.mask_cache import BlockMaskCache, CacheKey, PassKey, is_due

from .kept import bytes_of

CPU = torch.device("cpu")


def random_blocks(seed: int, *shape: int) -> torch.Tensor:
    active = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    active[..., 0] = True
    return active


@pytest.mark.parametrize("block_mask", [1, 7, 8, 9, 16, 133])
def test_the_union_of_a_batch_comes_back(block_mask: int, fresh_seed: int) -> None:
    active, kept = random_blocks(fresh_seed, 2, 3, 5, block_mask), BlockMaskCache()
    kept.keep(CacheKey(4, 3, 640, 128 * block_mask, CPU), PassKey(0), active)
    found = kept.before(CacheKey(4, 3, 640, 128 * block_mask, CPU), PassKey(1))
    assert found is not None and torch.equal(found.blocks.active(), active.any(dim=0, keepdim=True))
    assert bytes_of(kept) == 3 * 5 * -(-block_mask // 8)


def test_calls_of_one_step_share_their_blocks_and_a_later_step_begins_anew(fresh_seed: int) -> None:
    first, second, third = (random_blocks(fresh_seed + n, 1, 2, 6, 9) for n in range(3))
    kept = BlockMaskCache()
    for active in (first, second):
        kept.keep(CacheKey(0, 2, 700, 1100, CPU), PassKey(3), active)
    assert kept.before(CacheKey(0, 2, 700, 1100, CPU), PassKey(3)) is None, "a further call of the step may add to them"
    found = kept.before(CacheKey(0, 2, 700, 1100, CPU), PassKey(4))
    assert found is not None and torch.equal(found.blocks.active(), first | second)
    share = (first | second).float().mean().item()
    assert found.blocks.shares.mean().item() == pytest.approx(share)
    assert found.blocks.skipped_share() == pytest.approx(1.0 - share)
    kept.keep(CacheKey(0, 2, 700, 1100, CPU), PassKey(8), third)
    found = kept.before(CacheKey(0, 2, 700, 1100, CPU), PassKey(9))
    assert found is not None and torch.equal(found.blocks.active(), third)


def test_each_size_has_its_own(fresh_seed: int) -> None:
    first, second = (random_blocks(fresh_seed + n, 1, 2, 6, 9) for n in range(2))
    kept = BlockMaskCache()
    kept.keep(CacheKey(0, 2, 700, 1100, CPU), PassKey(3), first)
    assert kept.before(CacheKey(0, 2, 700, 1101, CPU), PassKey(4)) is None
    assert kept.before(CacheKey(0, 2, 701, 1100, CPU), PassKey(4)) is None
    assert kept.before(CacheKey(0, 4, 700, 1100, CPU), PassKey(4)) is None
    assert kept.before(CacheKey(1, 2, 700, 1100, CPU), PassKey(4)) is None
    assert kept.before(CacheKey(0, 2, 700, 1100, torch.device("meta")), PassKey(4)) is None
    kept.keep(CacheKey(0, 2, 701, 1100, CPU), PassKey(3), second)  # such as that of a longer prompt
    for length, active in ((700, first), (701, second)):
        found = kept.before(CacheKey(0, 2, length, 1100, CPU), PassKey(4))
        assert found is not None and torch.equal(found.blocks.active(), active)
    kept.clear()
    assert kept.before(CacheKey(0, 2, 701, 1100, CPU), PassKey(4)) is None and bytes_of(kept) == 0


def test_blocks_of_a_hooks_former_strength_give_way(fresh_seed: int) -> None:
    kept, call = BlockMaskCache(), CacheKey(0, 2, 700, 1100, CPU, frozenset({"lora"}))
    for step, strength in enumerate((0.5, 1.0)):
        now, active = (
            PassKey(step, changes=frozenset({("lora", strength)})),
            random_blocks(fresh_seed + step, 1, 2, 6, 9),
        )
        kept.keep(call, now, active)
        found = kept.before(call, now._replace(step=2))
        assert found is not None and torch.equal(found.blocks.active(), active)
        assert found.is_for(now) and not found.is_for(PassKey(step)) and found.gives_way(PassKey(step))
    assert bytes_of(kept) == 2 * 6 * 2, "those of the former one are not kept"


def test_blocks_of_wan_14b_take_70_megabytes() -> None:
    kept = BlockMaskCache()
    blocks = -(-75600 // 128)
    kept.keep(CacheKey(0, 1, 75600, 75600, CPU), PassKey(0), torch.ones(1, 1, blocks, blocks, dtype=torch.bool))
    assert 40 * 40 * bytes_of(kept) == pytest.approx(70e6, rel=0.02)


def test_blocks_are_found_in_steps_1_4_9_or_as_soon_as_can_be() -> None:
    found, steps = 0, [1]
    for step in range(1, 30):
        if is_due(found, step):
            found = step
            steps.append(step + 1)
    assert steps == [1, 4, 9, 16, 25]
    assert is_due(0, 5) and is_due(2, 12) and not is_due(3, 7) and not is_due(5, 7), "steps 4 and 9 were missed"
