"""The blocks of a call, kept for the next step."""

from __future__ import annotations

import torch

from ..system.readback import Readback
from .thresholds import Blocks

_BITS = 8


class PackedBlocks:
    """Blocks, a bit each.

    Attributes:
        shares: of each head's blocks, those that are active: (Hq,) float32 on the device.
        errors: of each head when they were chosen, (B, Hq) float32.
    """

    def __init__(self, blocks: Blocks, errors: torch.Tensor) -> None:
        active, self._by_tail = blocks
        self.shares, self.errors = active.float().mean(dim=(0, 2, 3)), errors
        self._count = active.shape[3]
        padded = torch.nn.functional.pad(active, (0, -self._count % _BITS))
        self._packed = (padded.unflatten(3, (-1, _BITS)) * _weights(active.device)).sum(dim=4, dtype=torch.uint8)
        figures = [self.shares.mean()]
        if self._by_tail is not None:
            figures.append(self._by_tail.any().float())
        self._on_host = Readback(len(figures), torch.float32, active.device)
        self._on_host.start(torch.stack(figures))

    def unpacked(self) -> Blocks:
        bits: torch.Tensor = self._packed[..., None] & _weights(self._packed.device)
        return Blocks(bits.ne(0).flatten(3)[..., : self._count], self._by_tail)

    def skipped_share(self) -> float:
        """The share of blocks that are skipped. Waits for what was enqueued before they were packed."""
        return 1.0 - self._on_host.values()[0]

    def has_tail(self) -> bool:
        """Whether a head has a tail; waits as `skipped_share` does."""
        return any(self._on_host.values()[1:])


def _weights(device: torch.device) -> torch.Tensor:
    return (2 ** torch.arange(_BITS, device=device)).to(torch.uint8)  # made there: nobody waits for a copy
