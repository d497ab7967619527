"""The active blocks of each layer, kept from the steps in which they are found to those in which they are used."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch

from .packed_blocks import PackedBlocks

MOST_TRIES = 4  # to find blocks for what those of a call do not serve, between two steps in which all are due

Prompts = frozenset[str]  # what calls are made for, as a sampler tells them apart; empty where it does not
ModelChanges = frozenset[tuple[Hashable, float]]  # what makes the model another one for a pass, and how strong it is
Moment = tuple[int, int]  # a step and an evaluation in it


def is_due(found: int, step: int) -> bool:
    """Whether blocks of the step `found`, from 0, are to be found anew in `step`.

    They are in steps 1, 4, 9 and so on of a count from 1, or in the first call after such a step. The latent settles,
    so that lists hold for longer and longer.
    """
    return math.isqrt(step + 1) > math.isqrt(found + 1)


class PassKey(NamedTuple):
    """A pass of the model, as far as it matters to blocks.

    Attributes:
        step: sampling step, from 0.
        evaluation: the sampler's evaluation of the model that it is a part of. A step may have several, of the same
            noise level too; always the same number where the sampler does not tell.
        prompts: what it is made for.
        changes: what makes the model another one for it, such as a prompt's own LoRA, or blocks that it skips.
        entries: what each entry of the batch is made for, in their order; empty where the sampler does not tell.
    """

    step: int
    evaluation: int = 0
    prompts: Prompts = frozenset()
    changes: ModelChanges = frozenset()
    entries: tuple[str, ...] = ()

    @property
    def moment(self) -> Moment:
        """Passes of one moment find blocks together."""
        return self.step, self.evaluation


class CacheKey(NamedTuple):
    """What calls that share their blocks have in common."""

    layer: int
    heads: int  # of q
    q_length: int
    kv_length: int
    device: torch.device
    changes: frozenset[Hashable] = frozenset()  # whatever their strength: blocks of another one give way


class CachedMask:
    """What was found in one evaluation of the model of the calls that share their blocks.

    Attributes:
        moment: when that was.
        blocks: that are active.
        prompts: what the calls were made for.
        changes: of the passes that they were made in.
        previous: what this took the place of, until it is used.
        additions: evaluations after the first that added to it.
        was_used: whether lists were made of it.
        unused_count: how many that it took the place of, one after the other, never did.
    """

    def __init__(self, first: PassKey, active: torch.Tensor, previous: CachedMask | None) -> None:
        """active: of the first call, which is of the pass `first`, bool (1, Hq, Tq, Tk)."""
        self.moment = first.moment
        self.prompts = first.prompts
        self.changes = first.changes
        self.previous = previous
        self.additions = 0
        self.was_used = False
        self.unused_count: int = 0 if previous is None or previous.was_used else previous.unused_count + 1
        self._before_addition: tuple[Moment, PackedBlocks, Prompts] | None = None
        self.blocks = PackedBlocks(active)

    def add(self, active: torch.Tensor, now: PassKey) -> None:
        """A further call's, of the pass `now`: the union is kept."""
        if now.moment != self.moment and not self.is_added_to(now):
            self._before_addition = (now.moment, self.blocks, self.prompts)
            self.additions += 1
        self.prompts |= now.prompts
        self.blocks = PackedBlocks(self.blocks.active() | active)

    def is_added_to(self, now: PassKey) -> bool:
        """Whether the evaluation of `now` has added to it."""
        return self._before_addition is not None and self._before_addition[0] == now.moment

    def forget_addition(self, now: PassKey) -> None:
        """Throw away what the evaluation of `now` added."""
        if self._before_addition is not None and self.is_added_to(now):
            _, self.blocks, self.prompts = self._before_addition
            self._before_addition = None
            self.additions -= 1

    def settle(self) -> None:
        """A later evaluation uses it: what it was before is not needed any more."""
        self.previous = self._before_addition = None

    def gives_way(self, now: PassKey) -> bool:
        """Whether what is found in `now` takes its place: it is time, or the blocks are those of another model."""
        return is_due(self.moment[0], now.step) or now.changes != self.changes

    def is_wanted(self, now: PassKey) -> bool:
        """Whether blocks are to be found in `now`, for which it is known.

        Between the steps in which all are due they are for what it does not serve, but not on and on.
        """
        if is_due(self.moment[0], now.step):
            return True
        if self.is_for(now):
            return False
        tried = self.additions if now.changes == self.changes else self.unused_count
        return tried < MOST_TRIES or self.is_added_to(now)

    def is_for(self, now: PassKey) -> bool:
        """Whether it was found for all that `now` is made for, with the same model."""
        return now.prompts <= self.prompts and now.changes == self.changes


class BlockMaskCache:
    """A bit for each block of each head and layer: N^2 / 131,072 bytes a head for N queries and keys.

    Twice that in an evaluation that finds them anew, which may have to be made again. Calls of several sizes, such as
    those of prompts of different length, and on several devices have their own.
    """

    def __init__(self) -> None:
        self._calls: dict[CacheKey, CachedMask] = {}

    def keep(self, call: CacheKey, now: PassKey, active: torch.Tensor) -> CachedMask:
        """Keep the active blocks of `call` in `now`, bool (B, Hq, Tq, Tk); returns what they were added to.

        Batch entries, such as the caption's and the empty one's, and all calls share the union of their blocks, until
        those are due to be found anew.
        """
        active = active.any(dim=0, keepdim=True)
        known = self._calls.get(call)
        if known is None or known.gives_way(now):
            known = self._calls[call] = CachedMask(now, active, known)
        else:
            known.add(active, now)
        return known

    def before(self, call: CacheKey, now: PassKey) -> CachedMask | None:
        """What was found of the blocks of `call` before the evaluation of `now`, in which they are still being found.

        None where nothing was.
        """
        known = self._calls.get(call)
        if known is None or known.moment == now.moment:
            return None
        if not known.is_added_to(now):
            known.settle()
        return known

    def replaced(self, call: CacheKey, now: PassKey) -> CachedMask | None:
        """What the evaluation of `now` finds anew of the blocks of `call`, as it was until then, or None."""
        known = self._calls.get(call)
        if known is not None and known.moment == now.moment:
            return known.previous
        return known if known is not None and known.gives_way(now) else None

    def forget(self, now: PassKey) -> None:
        """Throw away what the evaluation of `now` found; what was before stands again."""
        for call, known in list(self._calls.items()):
            if known.moment != now.moment:
                known.forget_addition(now)
            elif known.previous is None:
                self._calls.pop(call, None)
            else:
                self._calls[call] = known.previous

    def clear(self) -> None:
        """Throw all blocks away: the model, its weights, the conditioning, the seed or the sampler is another one."""
        self._calls.clear()
