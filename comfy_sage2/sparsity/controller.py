"""One sampling at one level: which of its calls find or choose blocks, and which skip those of earlier steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ..block_mask import BlockMask
from .always_computed import TokenRange, blocks_with, raise_always_computed_, raise_highest_
from .levels import Level
from .mask_cache import BlockMaskCache, CachedMask, CacheKey, Moment, PassKey
from .selection import block_lists, block_scores
from .selections import SelectionKey, Selections
from .thresholds import chosen, rank_, sampled_rows

Figure = tuple[Moment, torch.Tensor]


@dataclass
class Figures:
    """What became of a layer's blocks: moments, and tensors (Hq,) on the device, until someone reads them.

    Attributes:
        computed: for each call with lists, the share of the blocks that it computed of each head.
        found: for each call in which blocks were found, the error that each head's threshold was measured to have.
        selected: those of `found` in which the call chose its own blocks, and was not dense.
        later: for calls that found blocks anew, the error that each head would have had with the lists until then.
    """

    computed: list[Figure] = field(default_factory=list)
    found: list[Figure] = field(default_factory=list)
    selected: list[Figure] = field(default_factory=list)
    later: list[Figure] = field(default_factory=list)

    def forget(self, moment: Moment) -> None:
        """Throw away those of `moment`."""
        for figures in (self.computed, self.found, self.selected, self.later):
            figures[:] = [figure for figure in figures if figure[0] != moment]


class SparsityController:
    """The blocks of one sampling. Only `lists` waits for the device, for what was enqueued when they were found.

    Attributes:
        figures: layer -> what became of its blocks.
    """

    def __init__(self, level: Level) -> None:
        self._level = level
        self._kept = BlockMaskCache()
        self._selections = Selections(level.selection_steps)
        self._step = self._begun_at = 0
        self.figures: defaultdict[int, Figures] = defaultdict(Figures)

    def finds(self, layer: int, now: PassKey, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether a dense call in `now` is to find blocks: see `find`. Else `lists` has them.

        A call for prompts, or for a model with changes, for which none were found yet does: see `CachedMask.is_wanted`.
        q: (B, Hq, Nq, D), k: (B, Hkv, Nkv, D).
        """
        self._go_to(now.step)
        known = self._kept.before(_cache_key(layer, now, q, k), now)
        return known is None or known.is_wanted(now)

    def _go_to(self, step: int) -> None:
        """A sampler that goes back to `step` may have another latent, such as the next frames: throw all blocks away.

        One that looked ahead, as heunpp2 does, has the same: it goes back by one, to behind where it began to look.
        """
        if step < self._step:
            if step < self._step - 1 or step <= self._begun_at:
                self.clear()
            self._begun_at = step
        self._step = step

    def lists(
        self, layer: int, now: PassKey, q: torch.Tensor, k: torch.Tensor, *, least_skipped: float = 0.0
    ) -> BlockMask | str:
        """The block mask that dense calls found for a call, or why it has none.

        least_skipped: the share of the blocks that the mask must skip.
        """
        found = self._kept.before(_cache_key(layer, now, q, k), now)
        if found is None or not found.is_for(now):
            return "the prompt or LoRA changes from step to step: the block mask of an earlier step cannot be used"
        if found.blocks.skipped_share() < least_skipped:
            return _too_few(least_skipped)
        found.was_used = True
        self.figures[layer].computed.append((now.moment, found.blocks.shares))
        return _block_mask(found.blocks.active())

    def find(
        self,
        layer: int,
        now: PassKey,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: torch.Tensor,
        scale: float,
        always: tuple[TokenRange, ...] = (),
    ) -> CachedMask:
        """Keep the active blocks of a call in `now`, each head's by the loosest threshold within the bound.

        scores: (B, Hq, Tq, Tk) float32, as `reference.block_margins.block_margins` gives them; written to.
        always: tokens of q and k whose blocks are computed whatever their scores: as keys of all queries, and as
            queries with all keys. The others as for `errors`.

        Returns what is kept now, for this call and those before it in its evaluation.
        """
        call = _cache_key(layer, now, q, k)
        previous = self._kept.replaced(call, now)
        before = previous.blocks.active() if previous is not None and previous.is_for(now) else None
        return self._kept.keep(call, now, self._active(layer, now, q, k, v, scores, scale, always, before))

    def _active(
        self,
        layer: int,
        now: PassKey,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: torch.Tensor,
        scale: float,
        always: tuple[TokenRange, ...],
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """The active blocks, bool (B, Hq, Tq, Tk). before: those until now, whose error is measured too."""
        keys, queries = blocks_with(always, k.shape[2]), blocks_with(always, q.shape[2])
        rows = sampled_rows(q.shape[2], now.step, q.device, queries if always else None)
        raise_highest_(raise_always_computed_(scores, keys, queries))
        threshold, error, later = chosen(q, k, v, scores, rows, self._level, scale=scale, others=before)
        if later is not None:
            self.figures[layer].later.append((now.moment, later.amax(dim=0)))
        self.figures[layer].found.append((now.moment, error.amax(dim=0)))
        return ~(scores <= threshold[..., None, None])  # NaN is active

    def select(
        self,
        layer: int,
        now: PassKey,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        always: tuple[TokenRange, ...] = (),
        *,
        least_skipped: float = 0.0,
    ) -> BlockMask | str:
        """The block mask that a call chooses by scores of means of q and k, or that it chose a few steps ago.

        A choice does not wait for the device. The arguments are those of `find` and `lists`.

        Returns the mask, or why the call is to be dense.
        """
        self._go_to(now.step)
        call = _selection_key(layer, now, q, k)
        serving = self._selections.serving(call, now)
        if serving is None:
            previous = self._selections.previous(call, now)
            scores = rank_(block_scores(q, k, scale=scale))
            before = None if previous is None else previous.blocks.active()
            active = self._active(layer, now, q, k, v, scores, scale, always, before)
            self.figures[layer].selected.append(self.figures[layer].found[-1])
            serving = self._selections.keep(call, now, active)
        elif serving.blocks.skipped_share() < least_skipped:
            return _too_few(least_skipped)
        else:
            active = serving.blocks.active()
        self.figures[layer].computed.append((now.moment, serving.blocks.shares))
        return _block_mask(active)

    def forget(self, now: PassKey) -> None:
        """The pass `now` is made again: throw away what its evaluation found."""
        self._kept.forget(now)
        self._selections.forget(now)
        for figures in list(self.figures.values()):  # other threads may add to it
            figures.forget(now.moment)

    def clear(self) -> None:
        """Throw all blocks away; the figures stay."""
        self._kept.clear()
        self._selections.clear()


def _block_mask(active: torch.Tensor) -> BlockMask:
    """The lists of the active blocks, bool (B, Hq, Tq, Tk)."""
    return block_lists(active.float(), threshold=torch.full(active.shape[:2], 0.5, device=active.device))


def _cache_key(layer: int, now: PassKey, q: torch.Tensor, k: torch.Tensor) -> CacheKey:
    return CacheKey(layer, q.shape[1], q.shape[2], k.shape[2], q.device, frozenset(change for change, _ in now.changes))


def _selection_key(layer: int, now: PassKey, q: torch.Tensor, k: torch.Tensor) -> SelectionKey:
    return SelectionKey(layer, tuple(q.shape), k.shape[2], q.device, now.entries, now.changes)


def _too_few(least_skipped: float) -> str:
    return f"less than {least_skipped:.0%} of its key blocks can be skipped: that would save no time"


def values(figures: Iterable[Figure]) -> list[list[float]]:
    """What the tensors hold, a list of one number a head each, in no stated order; waits for each device once."""
    by_form: defaultdict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
    for _, tensor in figures:
        by_form[tensor.device, len(tensor)].append(tensor)
    return [value for found in by_form.values() for value in torch.stack(found).tolist()]
