"""The user's choice of how much a head's attention may lose by leaving out key blocks."""

from __future__ import annotations

import math
from typing import NamedTuple


class Level(NamedTuple):
    """A bound, or a share of the blocks.

    Attributes:
        bound: None, or the relative L2 error of each head, on a sample of its rows.
        share: None, or the share of the key blocks that each head computes for each block of queries.
        tail: the other blocks contribute by the means of their tokens: with a bound in the heads that then compute
            fewer blocks, with a share in all heads.
    """

    bound: float | None = None
    share: float | None = None
    tail: bool = False


OFF = "off"
LEVELS = {
    "light": Level(bound=0.02, tail=True),
    "medium": Level(bound=0.05, tail=True),
    "strong": Level(bound=0.1, tail=True),
    "draft 20 %": Level(share=0.2, tail=True),
    "draft 10 %": Level(share=0.1, tail=True),
}
"""The levels of the node's input `sparse`."""

LEAST_BLOCKS = 64  # of a call's keys: shorter calls stay dense
LEAST_HEADS = 40  # in the whole batch: with fewer heads, longer calls stay dense too
LEAST_BLOCKS_WITH_TAIL = 192  # of a call with a bound: in shorter ones a tail costs more than it saves


def least_blocks(heads: int) -> int:
    """The number of key blocks below which a choice by measured errors takes longer than it saves in two steps.

    Its cost is launches, and rows, of which longer calls take fewer. What it saves grows with heads and length squared.
    """
    return math.ceil(LEAST_BLOCKS * math.sqrt(max(LEAST_HEADS / heads, 1.0)))


def tail_cost(length: int) -> float:
    """The time of a tail relative to a dense call with `length` tokens: measured on an H200 at head_dim 128."""
    return 0.005 + 1050 / length
