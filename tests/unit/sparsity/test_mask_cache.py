"""Tiles that are kept between steps."""

from __future__ import annotations

import pytest
import torch

from comfy_sage2.sparsity.mask_cache import Call, KeptTiles, Pass, is_due

CPU = torch.device("cpu")


def random_tiles(seed: int, *shape: int) -> torch.Tensor:
    live = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    live[..., 0] = True
    return live


@pytest.mark.parametrize("tiles", [1, 7, 8, 9, 16, 133])
def test_the_union_of_a_batch_comes_back(tiles: int, fresh_seed: int) -> None:
    live, kept = random_tiles(fresh_seed, 2, 3, 5, tiles), KeptTiles()
    kept.keep(Call(4, 3, 640, 128 * tiles, CPU), Pass(0), live)
    found = kept.before(Call(4, 3, 640, 128 * tiles, CPU), Pass(1))
    assert found is not None and torch.equal(found.live(), live.any(dim=0, keepdim=True))
    assert kept.bytes == 3 * 5 * -(-tiles // 8)


def test_calls_of_one_step_share_their_tiles_and_a_later_step_begins_anew(fresh_seed: int) -> None:
    first, second, third = (random_tiles(fresh_seed + n, 1, 2, 6, 9) for n in range(3))
    kept = KeptTiles()
    for live in (first, second):
        kept.keep(Call(0, 2, 700, 1100, CPU), Pass(3), live)
    assert kept.before(Call(0, 2, 700, 1100, CPU), Pass(3)) is None, "a further call of the step may add to them"
    found = kept.before(Call(0, 2, 700, 1100, CPU), Pass(4))
    assert found is not None and torch.equal(found.live(), first | second)
    share = (first | second).float().mean().item()
    assert found.share.item() == pytest.approx(share) and found.dead_share() == pytest.approx(1.0 - share)
    kept.keep(Call(0, 2, 700, 1100, CPU), Pass(8), third)
    found = kept.before(Call(0, 2, 700, 1100, CPU), Pass(9))
    assert found is not None and torch.equal(found.live(), third)


def test_each_size_has_its_own(fresh_seed: int) -> None:
    first, second = (random_tiles(fresh_seed + n, 1, 2, 6, 9) for n in range(2))
    kept = KeptTiles()
    kept.keep(Call(0, 2, 700, 1100, CPU), Pass(3), first)
    assert kept.before(Call(0, 2, 700, 1101, CPU), Pass(4)) is None
    assert kept.before(Call(0, 2, 701, 1100, CPU), Pass(4)) is None
    assert kept.before(Call(0, 4, 700, 1100, CPU), Pass(4)) is None
    assert kept.before(Call(1, 2, 700, 1100, CPU), Pass(4)) is None
    assert kept.before(Call(0, 2, 700, 1100, torch.device("meta")), Pass(4)) is None
    kept.keep(Call(0, 2, 701, 1100, CPU), Pass(3), second)  # such as that of a longer prompt
    for length, live in ((700, first), (701, second)):
        found = kept.before(Call(0, 2, length, 1100, CPU), Pass(4))
        assert found is not None and torch.equal(found.live(), live)
    kept.clear()
    assert kept.before(Call(0, 2, 701, 1100, CPU), Pass(4)) is None and kept.bytes == 0


def test_tiles_of_a_hooks_former_strength_give_way(fresh_seed: int) -> None:
    kept, call = KeptTiles(), Call(0, 2, 700, 1100, CPU, frozenset({"lora"}))
    for step, strength in enumerate((0.5, 1.0)):
        now, live = Pass(step, changes=frozenset({("lora", strength)})), random_tiles(fresh_seed + step, 1, 2, 6, 9)
        kept.keep(call, now, live)
        found = kept.before(call, now._replace(step=2))
        assert found is not None and torch.equal(found.live(), live)
        assert found.is_for(now) and not found.is_for(Pass(step)) and found.gives_way(Pass(step))
    assert kept.bytes == 2 * 6 * 2, "those of the former one are not kept"


def test_tiles_of_wan_14b_take_70_megabytes() -> None:
    kept = KeptTiles()
    tiles = -(-75600 // 128)
    kept.keep(Call(0, 1, 75600, 75600, CPU), Pass(0), torch.ones(1, 1, tiles, tiles, dtype=torch.bool))
    assert 40 * 40 * kept.bytes == pytest.approx(70e6, rel=0.02)


def test_tiles_are_found_in_steps_1_4_9_or_as_soon_as_can_be() -> None:
    found, steps = 0, [1]
    for step in range(1, 30):
        if is_due(found, step):
            found = step
            steps.append(step + 1)
    assert steps == [1, 4, 9, 16, 25]
    assert is_due(0, 5) and is_due(2, 12) and not is_due(3, 7) and not is_due(5, 7), "steps 4 and 9 were missed"
