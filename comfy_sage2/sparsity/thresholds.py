"""Decides how many key blocks each head leaves out, by the error that is measured on a sample of its rows.

Each query block ranks its key blocks by their scores, and a head leaves out the lowest ranks, equally many in each
query block. A measurement decides how many: it takes the smallest of twelve shares whose error, like those of all
larger shares, is within the bound. Nothing waits for the device. One share for all heads would not do: a head that
attends to everything a little needs most of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from ..reference.block_scores import blocks_of_share
from ..system.readback import constant
from . import row_kernels
from .always_computed import raise_always_computed_
from .errors import Inputs, errors, popular, row_outputs
from .levels import Level, tail_cost
from .packed_blocks import Blocks
from .sampled_rows import sampled_rows

COMPUTED_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.03)
"""The shares of the key blocks that a head may compute.

They lie far apart, so that most heads stay well within the bound. At the same number of blocks, whole videos of the
demo model are 2 dB closer to the dense ones than with shares so fine that every head is at its bound.
"""
_RANKED_BYTES = 64 << 20  # of scores that are ranked at once


def rank_(scores: torch.Tensor) -> torch.Tensor:
    """Write the rank of each score among the key blocks of its query block, from 1 for the lowest: (B, Hq, Tq, Tk).

    A threshold between ranks leaves out equally many blocks of each query block. By a threshold of scores, a head would
    leave out most blocks where its queries attend to everything a little: there each block holds little, but all are
    needed. Of equal scores the lower block ranks higher. NaN becomes +inf, which no threshold leaves out.
    """
    ranks = constant(scores.device, _ranks, scores.shape[3])
    heads = scores.flatten(0, 1)
    step = max(_RANKED_BYTES // max(heads[0].numel() * scores.itemsize, 1), 1)
    for part in heads.split(step):
        unknown = part.isnan()
        order = part.sort(dim=2, descending=True, stable=True).indices
        part.scatter_(2, order, ranks.expand_as(part)).masked_fill_(unknown, math.inf)
    return scores


def _ranks(blocks: int) -> torch.Tensor:
    return torch.arange(blocks, 0, -1, dtype=torch.float32)


class Choice(NamedTuple):
    """The result of `choose`; errors are (B, Hq) float32.

    Attributes:
        blocks: those that the call computes.
        errors: those of each head on the sampled rows.
        compared_errors: those of the blocks to compare; None without such blocks.
        lists: `BlockMask.lists` of the blocks, if kernels computed them; else None.
    """

    blocks: Blocks
    errors: torch.Tensor
    compared_errors: torch.Tensor | None
    lists: torch.Tensor | None = None


def choose(
    inputs: Inputs, scores: torch.Tensor, level: Level, *, sample: int = 0, compared: Blocks | None = None
) -> Choice:
    """Choose the blocks of each head as `level` asks for.

    Args:
        scores: (B, Hq, T, T), as `block_scores` returns them; they may be overwritten.
        sample: the number of the sample of rows; other numbers give other rows.
        compared: blocks whose error is measured too.
    """
    length, blocks = inputs.k.shape[2], scores.shape[3]
    shares = COMPUTED_SHARES if level.share is None else (level.share,)
    module = row_kernels.module_for(inputs)
    if module is not None:
        with torch.no_grad():
            return Choice(*row_kernels.choose(module, inputs, scores, level, _counts(shares, blocks), sample, compared))
    with _in_float32(scores.device):
        outputs = row_outputs(inputs, sampled_rows(inputs.q, sample, inputs.always))
        raise_always_computed_(rank_(scores), inputs.always, length)
        scores.masked_fill_(popular(outputs)[:, :, None], math.inf)
        thresholds = constant(scores.device, cuts, shares, blocks)
        blocks_to_compare = None if compared is None else compared.active()
        measured = errors(outputs, scores, thresholds, blocks_to_compare, with_tail=level.tail)
        compared_errors, measured = measured.tensor_split((measured.shape[3] - len(shares),), dim=3)
        by_tail = None
        if level.bound is None:
            place = torch.zeros(measured.shape[1:3], dtype=torch.int64, device=scores.device)
            if level.tail:
                by_tail = torch.ones_like(place, dtype=torch.bool)
        else:
            place = loosest(measured[0], level.bound)
            if level.tail:
                place_of_tail = loosest(measured[1], level.bound)
                # The cuts count the blocks that are left out.
                by_tail = thresholds[place_of_tail] - thresholds[place] > blocks * tail_cost(length)
                place = place_of_tail.where(by_tail, place)
    return Choice(
        Blocks.of(scores > thresholds[place][..., None, None], by_tail),
        _error(measured.gather(3, place.expand(len(measured), -1, -1)[..., None])[..., 0], by_tail),
        None if compared is None else _error(compared_errors[..., 0], compared.by_tail),
    )


def blocks_error(inputs: Inputs, blocks: Blocks, *, sample: int = 0) -> torch.Tensor:
    """The relative L2 error of each head with these blocks: (B, Hq) float32; `sample` as for `choose`."""
    module = row_kernels.module_for(inputs)
    if module is not None:
        with torch.no_grad():
            return row_kernels.blocks_error(module, inputs, blocks, sample)
    with _in_float32(inputs.q.device):
        outputs = row_outputs(inputs, sampled_rows(inputs.q, sample, inputs.always))
        ranks, cut = blocks.active().float(), constant(inputs.q.device, torch.arange, 0.5, 2.0)
        return _error(errors(outputs, ranks, cut, with_tail=blocks.by_tail is not None)[..., 0], blocks.by_tail)


def _error(measured: torch.Tensor, by_tail: torch.Tensor | None) -> torch.Tensor:
    """Select each head's error, (B, Hq), from those without a tail and those with one."""
    return measured[0] if by_tail is None else measured[1].where(by_tail, measured[0])


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Disable autocast, which would round products of float32 to 16 bits; it does not affect kernels."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@lru_cache(maxsize=64)
def _counts(shares: tuple[float, ...], blocks: int) -> tuple[int, ...]:
    """How many of `blocks` to compute for each share."""
    return tuple(blocks_of_share(share, blocks) for share in shares)


def cuts(shares: Sequence[float], blocks: int) -> torch.Tensor:
    """The threshold of ranks for each share of `blocks` to compute, and one above all ranks: (L + 1,) float32."""
    left_out = (blocks - blocks_of_share(share, blocks) + 0.5 for share in shares)
    return torch.tensor([*left_out, math.inf], dtype=torch.float32)


def loosest(measured: torch.Tensor, bound: float) -> torch.Tensor:
    """The index of the loosest threshold whose error and those of all stricter ones are within `bound`: (B, Hq) int64.

    measured: (B, Hq, L), strictest first. The first threshold leaves out nothing, and is the result if no looser one is
    within the bound; NaN is within no bound.
    """
    return (measured[..., 1:].cummax(dim=2).values <= bound).sum(dim=2)
