"""Smoothing: subtract the mean that tokens share, so that channel outliers leave the quantized range (section 3.1)."""

from __future__ import annotations

import torch


def smooth_tokens(x: torch.Tensor, hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth K or V: (B, H, N, D) -> the centered tensor and the mean over its tokens (B, H, 1, D), float32.

    hidden: None, or bool (B | 1, N): tokens that are left out of the mean, and become zeros. Some token is not hidden.
    """
    x = x.float()
    if hidden is None:
        mean = x.mean(dim=2, keepdim=True)
        return x - mean, mean
    shown = (~hidden).sum(dim=1).view(-1, 1, 1, 1)
    mean = without_hidden(x, hidden).sum(dim=2, keepdim=True) / shown
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
