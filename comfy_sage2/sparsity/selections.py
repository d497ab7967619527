"""The blocks that calls chose for themselves by means of Q and K, kept for the same calls of the next steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .mask_cache import ModelChanges, Moment, PassKey
from .packed_blocks import PackedBlocks


class SelectionKey(NamedTuple):
    """What calls that share a choice have in common: nothing that the blocks depend on but the latent differs."""

    layer: int
    q_shape: tuple[int, ...]
    kv_length: int
    device: torch.device
    entries: tuple[str, ...]  # what the entries of the batch are made for, in their order; empty if that is not told
    changes: ModelChanges


class Selection(NamedTuple):
    """The blocks of one call, or the union of several of one moment that cannot be told apart, and their moment."""

    moment: Moment
    blocks: PackedBlocks


class Selections:
    """A bit for each block of each call of a pass: B N^2 / 131,072 bytes a head for N queries and keys.

    Batch entries, such as the caption's and the empty one's, have blocks of their own: a union of both computes 6 more
    points of them for a decibel. They serve `steps` steps, that in which they are chosen counted.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._calls: dict[SelectionKey, Selection] = {}

    def serving(self, call: SelectionKey, now: PassKey) -> Selection | None:
        """What serves `call` in `now`; None where it is to choose its blocks.

        In the moment of a choice another call may look the same, which has a choice of its own.
        """
        known = self._calls.get(call)
        return known if known is not None and known.moment != now.moment and self._serves(known, now) else None

    def previous(self, call: SelectionKey, now: PassKey) -> Selection | None:
        """What a choice in `now` takes the place of, or None."""
        known = self._calls.get(call)
        return known if known is not None and known.moment != now.moment else None

    def keep(self, call: SelectionKey, now: PassKey, active: torch.Tensor) -> Selection:
        """Keep what `call` chose in `now`.

        What others chose long ago is thrown away, such as that of former context windows.
        """
        known = self._calls.get(call)
        chosen = Selection(now.moment, PackedBlocks(active))
        if known is not None and known.moment == now.moment:
            self._calls[call] = Selection(now.moment, PackedBlocks(known.blocks.active() | active))
        else:
            self._calls[call] = chosen
        for other, kept in list(self._calls.items()):
            if other.layer == call.layer and self._age(kept, now) >= 2 * self._steps:
                self._calls.pop(other, None)
        return chosen

    def _serves(self, known: Selection, now: PassKey) -> bool:
        return 0 <= self._age(known, now) < self._steps

    @staticmethod
    def _age(known: Selection, now: PassKey) -> int:
        return now.step - known.moment[0]

    def forget(self, now: PassKey) -> None:
        """Throw away what was chosen in the evaluation of `now`."""
        for call, known in list(self._calls.items()):
            if known.moment == now.moment:
                self._calls.pop(call, None)

    def clear(self) -> None:
        """Throw all blocks away."""
        self._calls.clear()
