"""Where tensors lie in one buffer of bytes, with gaps between them that a kernel must not write to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .module_plan import Strides

UNTOUCHED = 0xFF  # in every byte: NaN in all float types
_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Slot:
    """Where a (B, H, N, D) tensor with gaps lies in a buffer of bytes."""

    offset: int
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    layout: str

    @property
    def _memory(self) -> tuple[int, int, int, int]:
        batch, heads, length, head_dim = self.shape
        return (batch, length, heads + 1, head_dim) if self.layout == "BNHD" else (batch, heads, length + 1, head_dim)

    @property
    def bytes(self) -> int:
        return math.prod(self._memory) * self.dtype.itemsize

    @property
    def strides(self) -> Strides:
        """Of batch, head and token, in elements."""
        _, second, third, channels = self._memory
        rows = second * third * channels, third * channels, channels
        return rows if self.layout == "BHND" else (rows[0], rows[2], rows[1])

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor, a view of `buffer`."""
        whole = buffer[self.offset : self.offset + self.bytes].view(self.dtype).view(self._memory)
        return whole[:, :, : self.shape[1]].transpose(1, 2) if self.layout == "BNHD" else whole[:, :, : self.shape[2]]


@dataclass
class MemoryLayout:
    """The slots of one buffer."""

    bytes: int = 0

    def add(self, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> Slot:
        slot = Slot(self.bytes, shape, dtype, layout)
        self.bytes += -(-slot.bytes // _ALIGNMENT) * _ALIGNMENT
        return slot

    def add_contiguous(self, elements: int, dtype: torch.dtype) -> Slot:
        """A slot of one head and one channel: its gap lies behind it."""
        return self.add((1, 1, elements, 1), dtype, "BHND")
