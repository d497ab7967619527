"""The blocks of a call, as one bit each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..system.readback import constant, copied

_BITS = 8
_ROW_BYTES = 4  # rows are multiples of it
_TAIL = 2.0  # added to a head's share, which is at most 1, to mark that it has a tail


class Blocks(NamedTuple):
    """Blocks of a self-attention call with T blocks of tokens.

    Attributes:
        bits: which ones are computed: uint8 (B, Hq, T, ceil(T / 32) * 4), block 0 in the lowest bit.
        by_tail: bool (B, Hq), in which heads the other blocks contribute by means; None if no head has a tail.
    """

    bits: torch.Tensor
    by_tail: torch.Tensor | None

    @classmethod
    def of(cls, active: torch.Tensor, by_tail: torch.Tensor | None = None) -> Blocks:
        """Pack the blocks that are active, bool (B, Hq, T, T)."""
        padded = torch.nn.functional.pad(active, (0, -active.shape[3] % (_BITS * _ROW_BYTES)))
        weighted = padded.unflatten(3, (-1, _BITS)) * constant(active.device, _weights)
        return cls(weighted.sum(dim=4, dtype=torch.uint8), by_tail)

    def active(self) -> torch.Tensor:
        """Unpack the blocks: bool (B, Hq, T, T)."""
        unpacked = self.bits[..., None] & constant(self.bits.device, _weights)
        return unpacked.ne(0).flatten(3)[..., : self.bits.shape[2]]

    def union(self, other: Blocks) -> Blocks:
        """The blocks that are in either; a head has a tail if it has one in either."""
        tails = [by_tail for by_tail in (self.by_tail, other.by_tail) if by_tail is not None]
        return Blocks(self.bits | other.bits, tails[0] if len(tails) == 1 else tails[0] | tails[1] if tails else None)


class KeptBlocks:
    """The blocks of a call, kept for the next step.

    Attributes:
        shares: the share of each head's blocks that is active: (Hq,) float32 on the device.
        errors: the error of each head when the blocks were chosen, (B, Hq) float32.
    """

    def __init__(self, blocks: Blocks, counts: torch.Tensor, errors: torch.Tensor) -> None:
        """counts: the number of active blocks of each block of queries, (B, Hq, T)."""
        self.blocks, self.errors = blocks, errors
        self.shares = counts.mean(dim=(0, 2), dtype=torch.float32).div_(counts.shape[2])
        # One copy holds all: the host computes the rest from it faster than it could launch that.
        figures = self.shares if blocks.by_tail is None else torch.add(self.shares, blocks.by_tail, alpha=_TAIL)
        self._on_host = copied(figures.flatten())

    def skipped_share(self) -> float:
        """The share of blocks that are skipped. Waits for what was enqueued before they were kept."""
        figures = self._on_host.values()
        return 1.0 - sum(figure - _TAIL if figure >= _TAIL else figure for figure in figures) / len(figures)

    def has_tail(self) -> bool:
        """Whether a head has a tail; waits as `skipped_share` does."""
        return any(figure >= _TAIL for figure in self._on_host.values())


def _weights() -> torch.Tensor:
    return (2 ** torch.arange(_BITS)).to(torch.uint8)
