"""Smoothing: subtract the mean that tokens share, so that channel outliers leave the quantized range (section 3.1)."""

from __future__ import annotations

import torch

# K is smoothed by the mean of this many tokens: any vector may be subtracted, and this one leaves values as small.
SAMPLED_TOKENS = 128
_MASK = 0xFFFFFFFF


def sampled_tokens(length: int, count: int = SAMPLED_TOKENS, device: torch.device | None = None) -> torch.Tensor:
    """One token from each of `count` equal parts of a sequence, int64; all tokens of a shorter sequence.

    Their positions in the parts look random but are fixed, so that the frames and rows of a video, which repeat, do not
    put them all in one place.
    """
    if length <= count:
        return torch.arange(length, device=device)
    part = torch.arange(count + 1, device=device) * length // count
    number = torch.arange(count, device=device)
    mixed = number * 0x9E3779B1 & _MASK
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & _MASK
    mixed = mixed ^ mixed >> 13
    return part[:-1] + (mixed * part.diff() >> 32)


def smooth_tokens(
    x: torch.Tensor, hidden: torch.Tensor | None = None, sampled: int | None = None, counted: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth K or V: (B, H, N, D) -> the centered tensor and the mean over its tokens (B, H, 1, D), float32.

    hidden: None, or bool (B | 1, N): tokens that are left out of the mean and become zeros; not all may be hidden.
    sampled: the mean is that of this many tokens, None: of all; with `hidden` always of all that are not hidden.
    counted: without `hidden`, the mean is taken from this many first tokens.
    """
    x = x.float()
    if hidden is None:
        tokens = x[:, :, :counted]
        if sampled is not None:
            # index_select gives the same order in memory, and so the same sum, for every layout of x.
            tokens = tokens.index_select(2, sampled_tokens(tokens.shape[2], sampled, x.device))
        mean = tokens.mean(dim=2, keepdim=True)
        return x - mean, mean
    visible = (~hidden).sum(dim=1).view(-1, 1, 1, 1)
    mean = without_hidden(x, hidden).sum(dim=2, keepdim=True) / visible
    return without_hidden(x - mean, hidden), mean


def without_hidden(x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """K or V (B, H, N, D) with zeros for hidden tokens, whatever these hold."""
    return x if hidden is None else x.masked_fill(hidden[:, None, :, None], 0.0)


def smooth_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth Q: (B, H, N, D) -> the centered tensor and the mean of each block of `block` tokens, float32.

    The means have shape (B, H, ceil(N / block), D); a ragged last block is averaged over the tokens it has.
    """
    x = x.float()
    means = torch.stack([part.mean(dim=2) for part in x.split(block, dim=2)], dim=2)
    return x - expand_blocks(means, block, x.shape[2]), means


def expand_blocks(means: torch.Tensor, block: int, length: int) -> torch.Tensor:
    """Give every token its block's row: (B, H, blocks, D) -> (B, H, length, D)."""
    rows = torch.arange(length, device=means.device) // block
    return means.index_select(2, rows)
