"""What the levels of `sparse` and `skip` allow: saved workflows and policies name them."""

from __future__ import annotations

import math

import pytest

from comfy_sage2.reference.block_margins import LOSSLESS
from comfy_sage2.sparsity.levels import LEVELS, SKIP_LEVELS, Level

SHARES_OF_P = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


@pytest.mark.parametrize(("name", "bound"), [("light", 0.02), ("medium", 0.05), ("strong", 0.1)])
def test_levels_that_choose_for_themselves(name: str, bound: float) -> None:
    assert LEVELS[name] == Level(name, bound, norm=2, ladder=None, least_blocks=64, selection_steps=2)


def test_lossless_leaves_out_what_is_rounded_to_zero() -> None:
    assert LEVELS["lossless"] == Level("lossless", 0.0, norm=2, ladder=(LOSSLESS,), least_blocks=64, selection_steps=0)
    assert SKIP_LEVELS["lossless"] == Level("lossless", 0.0, norm=1, ladder=(LOSSLESS,), least_blocks=16)


@pytest.mark.parametrize(("name", "bound"), [("balanced", 0.01), ("fast", 0.03)])
def test_levels_of_earlier_versions(name: str, bound: float) -> None:
    found = SKIP_LEVELS[name]
    assert (found.bound, found.norm, found.least_blocks, found.selection_steps) == (bound, 1, 16, 0)
    assert found.ladder == (LOSSLESS, *(pytest.approx(math.log2(share)) for share in SHARES_OF_P))
