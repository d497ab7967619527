"""The active blocks of a call, kept as a bit each."""

from __future__ import annotations

import torch

from ..system.readback import Readback

_BITS = 8


class PackedBlocks:
    """The active blocks of a call, and the share of them.

    Attributes:
        shares: of each head's blocks, those that are active: (Hq,) float32 on the device.
    """

    def __init__(self, active: torch.Tensor) -> None:
        """active: bool (B, Hq, Tq, Tk)."""
        self.shares = active.float().mean(dim=(0, 2, 3))
        self._packed, self._blocks = pack_blocks(active), active.shape[3]
        self._share_on_host = Readback(1, torch.float32, active.device)
        self._share_on_host.start(self.shares.mean())

    def active(self) -> torch.Tensor:
        """The active blocks, bool (B, Hq, Tq, Tk)."""
        return unpack_blocks(self._packed, self._blocks)

    def skipped_share(self) -> float:
        """Of the blocks, those that are skipped. Waits for what was enqueued before they were packed."""
        return 1.0 - self._share_on_host.values()[0]


def _weights(device: torch.device) -> torch.Tensor:
    return (2 ** torch.arange(_BITS, device=device)).to(torch.uint8)  # made there: nobody waits for a copy


def pack_blocks(active: torch.Tensor) -> torch.Tensor:
    """Bool (…, T) to uint8 (…, T / 8 rounded up)."""
    padded = torch.nn.functional.pad(active, (0, -active.shape[-1] % _BITS))
    bits = padded.view(*padded.shape[:-1], -1, _BITS) * _weights(active.device)
    return bits.sum(dim=-1, dtype=torch.uint8)


def unpack_blocks(packed: torch.Tensor, blocks: int) -> torch.Tensor:
    """The inverse of `pack_blocks` for T = `blocks`."""
    bits: torch.Tensor = packed[..., None] & _weights(packed.device)
    return bits.ne(0).flatten(-2)[..., :blocks]
