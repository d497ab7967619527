"""The key blocks that the calls of one sampling compute: each call chooses them, and keeps them for the next step.

A choice needs no dense call and no wait for the device: it ranks the blocks by means of Q and K, and each head leaves
out as many of the lowest ones as its bound allows. In the next step q, k and v have other values, but much the same
blocks matter. Its calls reuse the choice, so that half of all calls save the time of a choice. The first of them checks
whether its heads stay within the bound, because a sampler may switch to another latent without notice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..backends.block_kernels import block_scores, module_for
from ..block_mask import blocks_of
from . import levels
from .call_blocks import CallBlocks, call_blocks
from .errors import Inputs
from .levels import Level
from .packed_blocks import KeptBlocks
from .thresholds import blocks_error, choose

STEPS_SERVED = 2  # the steps that use one choice, including the step that makes it

ModelChanges = frozenset[tuple[Hashable, float]]  # what changes the model for a pass, each with its strength


class Moment(NamedTuple):
    """When a pass of the model runs.

    Attributes:
        step: sampling step, from 0.
        evaluation: the sampler's evaluation of the model that the pass belongs to. A step may have several, even at the
            same noise level. Always the same number if the sampler does not tell.
    """

    step: int
    evaluation: int = 0


class ChoiceKey(NamedTuple):
    """What calls that share a choice have in common: everything that the blocks depend on, except the latent."""

    layer: int
    q_shape: tuple[int, ...]
    kv_length: int
    device: torch.device
    entries: tuple[str, ...] = ()  # what each batch entry is for, in order; empty if unknown
    changes: ModelChanges = frozenset()


class _Choice(NamedTuple):
    """The blocks of one call, or the union of several calls of one moment that share a key."""

    moment: Moment
    blocks: KeptBlocks


# The moment of a call, and a number for each head, which stays on the device until it is read: (Hq,), or (B, Hq), of
# which the largest number of each head counts.
Figure = tuple[Moment, torch.Tensor]


@dataclass
class Figures:
    """What the sampling did with a layer's blocks.

    Attributes:
        computed: for each call, the share of the blocks that it computed.
        errors: for each choice, the error on the sampled rows.
        tails: for each choice, whether a head has a tail.
        outdated: for each choice that replaces another, the error that the old blocks would have had there.
    """

    computed: list[Figure] = field(default_factory=list)
    errors: list[Figure] = field(default_factory=list)
    tails: list[Figure] = field(default_factory=list)
    outdated: list[Figure] = field(default_factory=list)

    def forget(self, moment: Moment) -> None:
        for figures in (self.computed, self.errors, self.tails, self.outdated):
            figures[:] = [figure for figure in figures if figure[0] != moment]


class BlockChoices:
    """The choices of one sampling; several threads may call.

    They take a bit for each block of each call of a pass: B N^2 / 131,072 bytes a head for N queries and keys. Each
    batch entry, such as that of the empty prompt, has its own blocks: the union of two entries' blocks gains one
    decibel, but computes 6 percentage points more blocks.

    Attributes:
        figures: layer -> its `Figures`.
    """

    def __init__(self, level: Level) -> None:
        self._level = level
        self._choices: defaultdict[int, dict[ChoiceKey, _Choice]] = defaultdict(dict)  # of each layer
        self._step = self._returned_to = 0  # `_returned_to`: the step to which the sampler last went back
        self._checked: Moment | None = None  # the last moment that checked the blocks of an earlier one
        self.figures: defaultdict[int, Figures] = defaultdict(Figures)

    def blocks(
        self, key: ChoiceKey, moment: Moment, inputs: Inputs, *, least_skipped: float = 0.0
    ) -> CallBlocks | None:
        """The blocks of a call: those of an earlier step, or a new choice.

        Only a call that reuses blocks waits for the device: for the share that they skip, and in the first call of a
        moment for its heads' errors on the rows by which the blocks were chosen. If these are too large, all choices of
        earlier moments are dropped.

        Args:
            least_skipped: the share of blocks that reused blocks must skip to be worth the time.

        Returns:
            The blocks, or None if they skip fewer.
        """
        self._follow(moment.step)
        known = self._choices[key.layer].get(key)
        # Another call in the moment of a choice may have the same key; it makes its own choice.
        earlier = None if known is None or known.moment == moment else known
        if earlier is not None and 0 <= moment.step - earlier.moment.step < STEPS_SERVED:
            if earlier.blocks.skipped_share() < least_skipped:
                return None
            if not self._is_outdated(earlier, moment, inputs):
                self.figures[key.layer].computed.append((moment, earlier.blocks.shares))
                blocks = earlier.blocks.blocks
                return call_blocks(blocks if earlier.blocks.has_tail() else blocks._replace(by_tail=None))
        return self._choose(key, moment, inputs, earlier)

    def _is_outdated(self, earlier: _Choice, moment: Moment, inputs: Inputs) -> bool:
        """Whether this call, if it is the first of `moment`, loses too much by the blocks of an earlier moment.

        Too much is more than the bound in any head, or without a bound twice as much as when they were chosen.
        """
        if self._checked == moment:
            return False
        self._checked = moment
        lost = blocks_error(inputs, earlier.blocks.blocks, sample=earlier.moment.step)
        bound = self._level.bound
        is_near = lost.mean() <= 2.0 * earlier.blocks.errors.mean() if bound is None else (lost <= bound).all()
        if is_near:  # waits for the device
            return False
        self._drop(lambda choice: choice.moment != moment)
        return True

    def _choose(self, key: ChoiceKey, moment: Moment, inputs: Inputs, earlier: _Choice | None) -> CallBlocks:
        level = self._level
        if level.share is None and blocks_of(key.kv_length) < levels.LEAST_BLOCKS_WITH_TAIL:
            level = level._replace(tail=False)
        module = module_for(inputs.q.device)
        choice = choose(
            inputs,
            block_scores(module, inputs.q, inputs.k, inputs.scale, block_means=level.share is not None),
            level,
            sample=moment.step,
            compared=None if earlier is None else earlier.blocks.blocks,
        )
        blocks = choice.blocks
        chosen = call_blocks(blocks, choice.lists)
        kept = KeptBlocks(blocks, chosen.mask.lists[..., 0], choice.errors)
        figures = self.figures[key.layer]
        figures.computed.append((moment, kept.shares))
        figures.errors.append((moment, choice.errors))
        if blocks.by_tail is not None:
            figures.tails.append((moment, blocks.by_tail))
        if choice.compared_errors is not None:
            figures.outdated.append((moment, choice.compared_errors))
        choices = self._choices[key.layer]
        known = choices.get(key)
        if known is not None and known.moment == moment:
            blocks = blocks.union(known.blocks.blocks)
            counts = call_blocks(blocks).mask.lists[..., 0]
            kept = KeptBlocks(blocks, counts, choice.errors.maximum(known.blocks.errors))
        choices[key] = _Choice(moment, kept)
        for other_key, other_choice in list(choices.items()):  # such as those of earlier context windows
            if moment.step - other_choice.moment.step >= 2 * STEPS_SERVED:
                choices.pop(other_key, None)
        return chosen

    def _follow(self, step: int) -> None:
        """Drop all choices when the sampler goes back to `step`: its latent may be another one, such as of new frames.

        A sampler that looks ahead, such as heunpp2, has the same latent: it goes back by only one step, and to a later
        step than the last time.
        """
        if step < self._step:
            if step < self._step - 1 or step <= self._returned_to:
                self.clear()
            self._returned_to = step
        self._step = step

    def forget(self, moment: Moment) -> None:
        """Drop the choices and figures of `moment`, because its pass runs again."""
        self._drop(lambda choice: choice.moment == moment)
        for figures in list(self.figures.values()):  # other threads may add to it
            figures.forget(moment)

    def clear(self) -> None:
        self._choices.clear()

    def _drop(self, matches: Callable[[_Choice], bool]) -> None:
        for choices in list(self._choices.values()):  # other threads may add to them
            for key, choice in list(choices.items()):
                if matches(choice):
                    choices.pop(key, None)


def values(figures: Iterable[Figure]) -> list[list[float]]:
    """The numbers of the figures, a list for each call, in no particular order. Waits for each device once."""
    by_form: defaultdict[tuple[torch.device, torch.Size], list[torch.Tensor]] = defaultdict(list)
    for _, tensor in figures:
        by_form[tensor.device, tensor.shape].append(tensor)
    stacked = (torch.stack(tensors).float() for tensors in by_form.values())
    return [numbers for form in stacked for numbers in (form.amax(1) if form.dim() > 2 else form).tolist()]
