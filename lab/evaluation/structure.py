"""How much there is to smooth: what the tokens of Q, K and V share, and how far their peaks stand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .samples import AttentionSample

BLOCK = 128  # of smooth Q


@dataclass(frozen=True)
class Structure:
    """Of one tensor, averaged over samples and heads.

    token_mean, block_mean: the share of the squares that lies in the mean over all tokens, or over blocks of 128:
    what smoothing takes out. peak: the largest magnitude over the root mean square.
    """

    token_mean: float
    block_mean: float
    peak: float


def structure(samples: Sequence[AttentionSample]) -> dict[str, Structure]:
    """ "Q", "K", "V" -> what smoothing would find in them."""
    return {name.upper(): _of([getattr(sample, name) for sample in samples]) for name in "qkv"}


def _of(tensors: Sequence[torch.Tensor]) -> Structure:
    token_mean = block_mean = peak = 0.0
    for tensor in tensors:
        x = tensor.double()
        power = x.square().mean(dim=(2, 3))
        means = torch.stack([block.mean(dim=2) for block in x.split(BLOCK, dim=2)], dim=2)
        token_mean += (x.mean(dim=2).square().mean(dim=2) / power).mean().item()
        block_mean += (means.square().mean(dim=(2, 3)) / power).mean().item()
        peak += (x.abs().amax(dim=(2, 3)) / power.sqrt()).mean().item()
    count = len(tensors)
    return Structure(token_mean / count, block_mean / count, peak / count)
