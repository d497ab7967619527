"""The key blocks that the calls of one sampling compute: each call chooses them, and keeps them for the next step.

A choice needs no dense call and no wait for the device: it ranks the blocks by means of Q and K, and each head leaves
out as many of the lowest ones as its bound allows. The calls of the next step have other values in q, k and v but much
the same blocks. They reuse the choice, so that half of the calls save its time. The first of them checks whether its
heads stay within the bound: a sampler may go on with another latent without any sign.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..backends.block_kernels import block_lists, block_scores, module_for
from ..block_mask import BlockMask
from ..system.readback import Readback
from .always_computed import TokenRange
from .errors import Inputs
from .thresholds import blocks_error, choose

STEPS_SERVED = 2  # by one choice, the step in which it is made counted
_BITS = 8

ModelChanges = frozenset[tuple[Hashable, float]]  # what makes the model another one for a pass, and how strong it is


class Moment(NamedTuple):
    """When a pass of the model is made.

    Attributes:
        step: sampling step, from 0.
        evaluation: the sampler's evaluation of the model that the pass belongs to. A step may have several, even at the
            same noise level; always the same number where the sampler does not tell.
    """

    step: int
    evaluation: int = 0


class ChoiceKey(NamedTuple):
    """What calls that share a choice have in common: everything but the latent that the blocks depend on."""

    layer: int
    q_shape: tuple[int, ...]
    kv_length: int
    device: torch.device
    entries: tuple[str, ...] = ()  # what the entries of the batch are made for, in order; empty where nobody tells
    changes: ModelChanges = frozenset()


class PackedBlocks:
    """The active blocks of a call, a bit each, and the share of them.

    Attributes:
        shares: of each head's blocks, those that are active: (Hq,) float32 on the device.
    """

    def __init__(self, active: torch.Tensor) -> None:
        """active: bool (B, Hq, Tq, Tk)."""
        self.shares = active.float().mean(dim=(0, 2, 3))
        self._blocks = active.shape[3]
        padded = torch.nn.functional.pad(active, (0, -self._blocks % _BITS))
        bits = padded.unflatten(3, (-1, _BITS)) * _weights(active.device)
        self._packed = bits.sum(dim=4, dtype=torch.uint8)
        self._share_on_host = Readback(1, torch.float32, active.device)
        self._share_on_host.start(self.shares.mean())

    def active(self) -> torch.Tensor:
        """Bool (B, Hq, Tq, Tk)."""
        bits: torch.Tensor = self._packed[..., None] & _weights(self._packed.device)
        return bits.ne(0).flatten(3)[..., : self._blocks]

    def skipped_share(self) -> float:
        """The share of blocks that are skipped. Waits for what was enqueued before they were packed."""
        return 1.0 - self._share_on_host.values()[0]


def _weights(device: torch.device) -> torch.Tensor:
    return (2 ** torch.arange(_BITS, device=device)).to(torch.uint8)  # made there: nobody waits for a copy


class _Choice(NamedTuple):
    """The blocks of one call, or the union of several calls of one moment that share a key."""

    moment: Moment
    blocks: PackedBlocks


# One number for each head (Hq,), which stays on the device until someone reads it, and the moment of its call.
Figure = tuple[Moment, torch.Tensor]


@dataclass
class Figures:
    """What the sampling did with a layer's blocks.

    Attributes:
        computed: of each call, the share of the blocks that it computed.
        errors: of each choice, the error on the sampled rows.
        outdated: of each choice that replaces another, the error that the old blocks would have had there.
    """

    computed: list[Figure] = field(default_factory=list)
    errors: list[Figure] = field(default_factory=list)
    outdated: list[Figure] = field(default_factory=list)

    def forget(self, moment: Moment) -> None:
        for figures in (self.computed, self.errors, self.outdated):
            figures[:] = [figure for figure in figures if figure[0] != moment]


class BlockChoices:
    """The choices of one sampling; several threads may call.

    They take a bit for each block of each call of a pass: B N^2 / 131,072 bytes a head for N queries and keys. Batch
    entries, such as the caption's and the empty one's, have blocks of their own: a union of both computes 6 more points
    of them for a decibel.

    Attributes:
        figures: layer -> what became of its blocks.
    """

    def __init__(self, bound: float) -> None:
        """bound: the largest relative L2 error of a head."""
        self._bound = bound
        self._choices: dict[ChoiceKey, _Choice] = {}
        self._step = self._begun_at = 0
        self._checked: Moment | None = None  # the last one in which blocks of an earlier one were held to the bound
        self.figures: defaultdict[int, Figures] = defaultdict(Figures)

    def block_mask(
        self,
        key: ChoiceKey,
        moment: Moment,
        inputs: Inputs,
        *,
        always: tuple[TokenRange, ...] = (),
        least_skipped: float = 0.0,
    ) -> BlockMask | None:
        """The block mask of a call, which this call or an earlier step chooses.

        Only a mask of an earlier step waits for the device: for the share of blocks that it skips, and the first of a
        moment for what its heads lose on the rows that it was chosen by. Beyond the bound all choices of earlier
        moments are thrown away.

        Args:
            inputs: of the call.
            always: tokens whose blocks are computed whatever their scores: as keys of all queries, and as queries with
                all keys.
            least_skipped: the share of the blocks that a mask of an earlier step must skip to be worth its time.

        Returns:
            The mask, or None where it would skip fewer blocks.
        """
        self._follow(moment.step)
        known = self._choices.get(key)
        # In the moment of a choice another call may look the same, which has a choice of its own.
        earlier = None if known is None or known.moment == moment else known.blocks
        if known is None or earlier is None or not 0 <= moment.step - known.moment.step < STEPS_SERVED:
            blocks = self._choose(key, moment, inputs, always, earlier)
        elif earlier.skipped_share() < least_skipped:
            return None
        elif self._is_outdated(known, moment, inputs, always):
            self._forget_before(moment)
            blocks = self._choose(key, moment, inputs, always, earlier)
        else:
            blocks = earlier
        self.figures[key.layer].computed.append((moment, blocks.shares))
        active = blocks.active().float()
        threshold = torch.full(active.shape[:2], 0.5, device=active.device)
        return BlockMask(block_lists(module_for(active.device), active, threshold=threshold))

    def _is_outdated(self, known: _Choice, moment: Moment, inputs: Inputs, always: tuple[TokenRange, ...]) -> bool:
        """Whether a head of this call, the first one of `moment` to ask, loses more than the bound by these blocks."""
        if self._checked == moment:
            return False
        self._checked = moment
        lost = blocks_error(inputs, known.blocks.active(), sample=known.moment.step, always=always)
        return not bool((lost <= self._bound).all())

    def _forget_before(self, moment: Moment) -> None:
        for key, choice in list(self._choices.items()):
            if choice.moment != moment:
                self._choices.pop(key, None)

    def _choose(
        self,
        key: ChoiceKey,
        moment: Moment,
        inputs: Inputs,
        always: tuple[TokenRange, ...],
        earlier: PackedBlocks | None,
    ) -> PackedBlocks:
        scores = block_scores(module_for(inputs.q.device), inputs.q, inputs.k, inputs.scale)
        outdated = None if earlier is None else earlier.active()
        choice = choose(inputs, scores, self._bound, sample=moment.step, always=always, compared=outdated)
        figures = self.figures[key.layer]
        figures.errors.append((moment, choice.errors.amax(dim=0)))
        if choice.compared_errors is not None:
            figures.outdated.append((moment, choice.compared_errors.amax(dim=0)))
        active = scores > choice.thresholds[..., None, None]
        known, blocks = self._choices.get(key), PackedBlocks(active)
        shares_moment = known is not None and known.moment == moment
        kept = PackedBlocks(known.blocks.active() | active) if known is not None and shares_moment else blocks
        self._choices[key] = _Choice(moment, kept)
        for other, choice_of_other in list(self._choices.items()):  # such as those of former context windows
            if other.layer == key.layer and moment.step - choice_of_other.moment.step >= 2 * STEPS_SERVED:
                self._choices.pop(other, None)
        return blocks

    def _follow(self, step: int) -> None:
        """Drop all choices when the sampler goes back to `step`: its latent may be another one, as of new frames.

        A sampler that looked ahead, as heunpp2 does, has the same latent: it goes back by one step, to behind where it
        began to look.
        """
        if step < self._step:
            if step < self._step - 1 or step <= self._begun_at:
                self.clear()
            self._begun_at = step
        self._step = step

    def forget(self, moment: Moment) -> None:
        """Drop the choices and figures of `moment`, because its pass runs again."""
        for key, choice in list(self._choices.items()):
            if choice.moment == moment:
                self._choices.pop(key, None)
        for figures in list(self.figures.values()):  # other threads may add to it
            figures.forget(moment)

    def clear(self) -> None:
        """Drop all choices; the figures stay."""
        self._choices.clear()


def values(figures: Iterable[Figure]) -> list[list[float]]:
    """The numbers of the figures, a list for each call, in no stated order. Waits for each device once."""
    by_form: defaultdict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
    for _, tensor in figures:
        by_form[tensor.device, len(tensor)].append(tensor)
    return [numbers for tensors in by_form.values() for numbers in torch.stack(tensors).tolist()]
