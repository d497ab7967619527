"""How many key blocks each head leaves out, by the error that is measured on a sample of its rows.

Each query block ranks its key blocks by their scores, and a head leaves out the lowest ranks, equally many in each
query block. A measurement decides how many: it takes the smallest of twelve shares whose error, like those of all
larger shares, is within the bound. Nothing waits for the device. One share for all heads would not do: a head that
attends to everything a little needs most of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..reference.block_scores import blocks_of_share
from ..system.readback import uploaded
from .always_computed import TokenRange, blocks_with, raise_always_computed_
from .errors import Inputs, errors, popular, row_outputs
from .sampled_rows import sampled_rows

COMPUTED_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.03)
"""Of the key blocks that a head may compute.

They lie far apart, so that most heads stay well within the bound. At the same number of blocks, whole videos of the
demo model are 2 dB closer to the dense ones than with shares so fine that every head is at its bound.
"""
_RANKED_BYTES = 64 << 20  # of scores, at once


def rank_(scores: torch.Tensor) -> torch.Tensor:
    """Write the rank of each score among the key blocks of its query block, from 1 for the lowest: (B, Hq, Tq, Tk).

    A threshold between ranks leaves out as many blocks of each query block. By scores themselves a head would leave
    out most where its queries attend to everything a little: there each block holds little, and yet all are needed.
    NaN becomes +inf, which no threshold leaves out.
    """
    ranks = torch.arange(1.0, scores.shape[3] + 1.0, device=scores.device)
    heads = scores.flatten(0, 1)
    step = max(_RANKED_BYTES // max(heads[0].numel() * scores.itemsize, 1), 1)
    for part in heads.split(step):
        unknown = part.isnan()
        order = part.sort(dim=2, stable=True).indices
        part.scatter_(2, order, ranks.expand_as(part)).masked_fill_(unknown, math.inf)
    return scores


class Choice(NamedTuple):
    """What `choose` gives, (B, Hq) float32 each.

    Attributes:
        thresholds: a block is active where its rank is above.
        errors: of each head on the sampled rows.
        compared_errors: those of the blocks to compare; None without them.
    """

    thresholds: torch.Tensor
    errors: torch.Tensor
    compared_errors: torch.Tensor | None


def choose(
    inputs: Inputs,
    scores: torch.Tensor,
    bound: float,
    *,
    sample: int = 0,
    always: tuple[TokenRange, ...] = (),
    compared: torch.Tensor | None = None,
) -> Choice:
    """The fewest blocks of each head whose error is within `bound`; `scores` become the ranks that thresholds are of.

    Args:
        scores: (B, Hq, T, T), as `block_scores` gives them.
        bound: relative L2 error of a head.
        sample: the number of the sample of rows; other numbers give other rows.
        always: tokens whose blocks are computed whatever their scores, in blocks of 128: as keys of all queries, and as
            queries with all keys.
        compared: bool (B, Hq, T, T), active blocks whose error is measured too.
    """
    blocks = blocks_with(always, inputs.k.shape[2])
    rows = sampled_rows(inputs.q, sample, blocks if always else None)
    with _in_float32(scores.device):
        outputs = row_outputs(inputs, rows)
        raise_always_computed_(rank_(scores), blocks)
        scores.masked_fill_(popular(outputs)[:, :, None], math.inf)
        thresholds = cuts(COMPUTED_SHARES, scores.shape[3], scores.device)
        (measured,) = errors(outputs, scores, thresholds, compared)
    of_compared, measured = measured.tensor_split((measured.shape[2] - len(thresholds),), dim=2)
    place = loosest(measured, bound)
    return Choice(
        thresholds[place],
        measured.gather(2, place[..., None])[..., 0],
        None if compared is None else of_compared[..., 0],
    )


def blocks_error(
    inputs: Inputs, active: torch.Tensor, *, sample: int = 0, always: tuple[TokenRange, ...] = ()
) -> torch.Tensor:
    """The relative L2 error of each head that computes its `active` blocks, bool (B, Hq, T, T): (B, Hq) float32.

    The other arguments are those of `choose`.
    """
    rows = sampled_rows(inputs.q, sample, blocks_with(always, inputs.q.shape[2]) if always else None)
    with _in_float32(active.device):
        return errors(row_outputs(inputs, rows), active.float(), torch.full((1,), 0.5, device=active.device))[0, ..., 0]


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Without autocast, which would round products of float32 to 16 bits."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def cuts(shares: Sequence[float], blocks: int, device: torch.device) -> torch.Tensor:
    """The threshold of ranks for each share of `blocks` to compute: (L,) float32."""
    return uploaded(torch.tensor([blocks - blocks_of_share(share, blocks) + 0.5 for share in shares]), device)


def loosest(measured: torch.Tensor, bound: float) -> torch.Tensor:
    """The place of the loosest threshold whose error and those of all stricter ones are within `bound`: (B, Hq) int64.

    measured: (B, Hq, L), strictest first. The first threshold leaves out nothing and stands where no looser one is
    within the bound; NaN is not within any.
    """
    return (measured[..., 1:] <= bound).long().cumprod(dim=2).sum(dim=2)
