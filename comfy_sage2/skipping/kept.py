"""The live tiles of each layer, kept from the steps in which they are found to those in which they are used."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..tiles import TileLists

_BITS = 8


def finds(step: int) -> bool:
    """Whether tiles are found anew in this step, from 0: in steps 1, 4, 9 and so on of a count from 1.

    The latent settles, so that lists hold for longer and longer.
    """
    return math.isqrt(step + 1) ** 2 == step + 1


@dataclass
class _Layer:
    step: int
    q_length: int
    kv_length: int
    tiles: int
    live: torch.Tensor  # (1, Hq, Tq, Tk / 8 rounded up) uint8, a bit a tile

    def fits(self, heads: int, q_length: int, kv_length: int, device: torch.device) -> bool:
        """Whether these are the tiles of a call of this size there."""
        size = (self.live.shape[1], self.q_length, self.kv_length)
        return size == (heads, q_length, kv_length) and self.live.device == device


class KeptTiles:
    """A bit for each tile of each head and layer: N^2 / 131,072 bytes a head for N queries and keys."""

    def __init__(self) -> None:
        self._layers: dict[int, _Layer] = {}

    def keep(self, layer: int, step: int, live: torch.Tensor, q_length: int, kv_length: int) -> None:
        """Keep the live tiles of a call, bool (B, Hq, Tq, Tk).

        Batch entries, such as the caption's and the empty one's, and all calls of one step share the union of their
        tiles. Tiles of an earlier step, or of a call of another size, are thrown away.
        """
        packed = _pack(live.any(dim=0, keepdim=True))
        known = self._layers.get(layer)
        size = packed.shape[1], q_length, kv_length, packed.device
        if known is not None and known.step == step and known.fits(*size):
            known.live |= packed
            return
        self._layers[layer] = _Layer(step, q_length, kv_length, live.shape[3], packed)

    def lists(self, layer: int, heads: int, q_length: int, kv_length: int, device: torch.device) -> TileLists | None:
        """The lists of a call of this size, or None where none are kept for it."""
        known = self._layers.get(layer)
        if known is None or not known.fits(heads, q_length, kv_length, device):
            return None
        return TileLists.of_mask(_unpack(known.live, known.tiles))

    def clear(self) -> None:
        """Throw all tiles away: the model, its weights, the conditioning, the seed or the sampler is another one."""
        self._layers.clear()

    @property
    def bytes(self) -> int:
        """What is kept takes so many bytes."""
        return sum(layer.live.numel() for layer in self._layers.values())


def _weights(device: torch.device) -> torch.Tensor:
    return torch.tensor([1 << bit for bit in range(_BITS)], dtype=torch.uint8, device=device)


def _pack(live: torch.Tensor) -> torch.Tensor:
    """Bool (…, T) to uint8 (…, T / 8 rounded up)."""
    padded = torch.nn.functional.pad(live, (0, -live.shape[-1] % _BITS))
    bits = padded.view(*padded.shape[:-1], -1, _BITS) * _weights(live.device)
    return bits.sum(dim=-1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, tiles: int) -> torch.Tensor:
    """The inverse of `_pack` for T = `tiles`."""
    bits: torch.Tensor = packed[..., None] & _weights(packed.device)
    return bits.ne(0).flatten(-2)[..., :tiles]
