"""How much may be left out, as the user chooses it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..reference.block_margins import LOSSLESS


@dataclass(frozen=True)
class Level:
    """What a head's attention may lose by the key blocks that are left out of it.

    Attributes:
        name: as the user chooses it.
        bound: the relative error of a head on rows that are sampled; 0 leaves out only what 8b rounds to zero.
        norm: of that error: 1 for relative L1, 2 for relative L2.
        ladder: the thresholds to choose from, strictest first, as log2 of a block's largest P relative to its row's;
            None leaves out a number of key blocks for each block of queries, the same for all of a head.
        least_blocks: of a call's keys: shorter calls stay dense.
        selection_steps: so many steps are served by blocks that a call behind the first steps chose for itself, by
            means of Q and K; 0 where blocks are found in dense calls.
    """

    name: str
    bound: float
    norm: int
    ladder: tuple[float, ...] | None
    least_blocks: int
    selection_steps: int = 0


_SELECTION_STEPS = 2
_LADDER = (LOSSLESS, *(math.log2(share) for share in (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)))


def _sparse(name: str, bound: float) -> Level:
    if bound == 0.0:  # what 8b rounds to zero is known of the scores themselves alone
        return Level(name, bound, norm=2, ladder=(LOSSLESS,), least_blocks=64)
    return Level(name, bound, norm=2, ladder=None, least_blocks=64, selection_steps=_SELECTION_STEPS)


def _skip(name: str, bound: float) -> Level:
    return Level(name, bound, norm=1, ladder=_LADDER[:1] if bound == 0.0 else _LADDER, least_blocks=16)


LEVELS = {
    level.name: level
    for level in (_sparse("lossless", 0.0), _sparse("light", 0.02), _sparse("medium", 0.05), _sparse("strong", 0.1))
}
"""The levels of the input `sparse`, by their names."""

SKIP_LEVELS = {level.name: level for level in (_skip("lossless", 0.0), _skip("balanced", 0.01), _skip("fast", 0.03))}
"""The levels of the input `skip`, which `sparse` took the place of: workflows and policies of that time have it."""
