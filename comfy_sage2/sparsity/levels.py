"""How much a head's attention may lose by the key blocks that are left out, as the user chooses it."""

from __future__ import annotations

import math
from typing import NamedTuple


class Level(NamedTuple):
    """By a bound or by a share of the blocks.

    Attributes:
        bound: None, or the relative L2 error of each head, on a sample of its rows.
        share: None, or the share of the key blocks that each head computes for each block of queries.
        tail: the other blocks take part by the means of their tokens: with a bound in those heads that compute fewer
            blocks so, with a share in all.
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
"""Of `sparse`."""

LEAST_BLOCKS = 64  # of a call's keys: shorter calls stay dense
LEAST_HEADS = 40  # in all entries of a batch: with fewer of them longer calls do
LEAST_BLOCKS_WITH_TAIL = 192  # of a call by a bound: in shorter ones a tail costs more than it saves


def least_blocks(heads: int) -> int:
    """The blocks of keys below which a choice by measured errors takes longer than the call saves, in two steps.

    It takes launches, and a number of rows that falls as calls grow; what it saves grows with heads and length squared.
    """
    return math.ceil(LEAST_BLOCKS * math.sqrt(max(LEAST_HEADS / heads, 1.0)))


def tail_cost(length: int) -> float:
    """What a tail takes of the time of a dense call with `length` tokens: measured on an H200 at head_dim 128."""
    return 0.005 + 1050 / length
