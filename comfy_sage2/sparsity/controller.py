"""One sampling at one level: which of its calls find the blocks to skip, and which skip those of earlier steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from ..block_mask import BLOCK_TOKENS, BlockMask
from .always_computed import TokenRange, blocks_with, raise_always_computed_, raise_highest_
from .levels import Level
from .mask_cache import BlockMaskCache, CachedMask, CacheKey, Moment, PassKey
from .selection import block_lists, block_scores
from .thresholds import candidates, errors, loosest, sampled_rows

Figure = tuple[Moment, torch.Tensor]


@dataclass
class Figures:
    """What became of a layer's blocks: moments, and tensors (Hq,) on the device, until someone reads them.

    Attributes:
        computed: for each call with lists, the share of the blocks that it computed of each head.
        found: for each call in which blocks were found, the error that each head's threshold was measured to have.
        selected: those of `found` in which the call that found blocks left out the others itself, and was not dense.
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

    def __init__(self, level: Level, *, block_tokens: int = BLOCK_TOKENS) -> None:
        """block_tokens: of a block of the scores; only emulations have others than the kernels'."""
        self._level = level
        self._block_tokens = block_tokens
        self._errors = partial(errors, norm=level.norm, block_tokens=block_tokens)
        self._kept = BlockMaskCache()
        self._step = self._begun_at = 0
        self.figures: defaultdict[int, Figures] = defaultdict(Figures)

    def finds(self, layer: int, now: PassKey, q: torch.Tensor, k: torch.Tensor, *, selects: bool = False) -> bool:
        """Whether a call in `now` is to find blocks: see `find` and `select`. Else `lists` has them.

        A call for prompts, or for a model with changes, for which none were found yet does: see `CachedMask.is_wanted`.
        q: (B, Hq, Nq, D), k: (B, Hkv, Nkv, D). selects: the call would not be dense for it, so that there is no limit.
        """
        self._go_to(now.step)
        known = self._kept.before(_cache_key(layer, now, q, k), now)
        return known is None or known.is_wanted(now) or (selects and not known.is_for(now))

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
        """The block mask for a call that is not dense, or why it has none.

        least_skipped: the share of the blocks that the mask must skip.
        """
        found = self._kept.before(_cache_key(layer, now, q, k), now)
        if found is None or not found.is_for(now):
            return "the prompt or LoRA changes from step to step: the block mask of an earlier step cannot be used"
        if found.skipped_share() < least_skipped:
            return f"less than {least_skipped:.0%} of its key blocks can be skipped: that would save no time"
        found.was_used = True
        self.figures[layer].computed.append((now.moment, found.shares))
        return _block_mask(found.active())

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

        scores: (B, Hq, Tq, Tk) float32, the higher the more a block matters, such as those that
            `reference.block_margins.block_margins` gives of a dense call; written to.
        always: tokens of q and k whose blocks are computed whatever their scores: as keys of all queries, and as
            queries with all keys. The others as for `errors`.

        Returns what is kept now, for this call and those before it in its evaluation.
        """
        call, figures = _cache_key(layer, now, q, k), self.figures[layer]
        tokens = self._block_tokens
        keys, queries = blocks_with(always, k.shape[2], tokens), blocks_with(always, q.shape[2], tokens)
        rows = sampled_rows(q.shape[2], now.step, q.device, queries if always else None, block_tokens=tokens)
        raise_highest_(raise_always_computed_(scores, keys, queries))
        previous = self._kept.replaced(call, now)
        if previous is not None and previous.is_for(now):
            as_scores = previous.active().float().expand(q.shape[0], -1, -1, -1)
            half = as_scores.new_full((*q.shape[:2], 1), 0.5)
            later = self._errors(q, k, v, as_scores, rows, scale=scale, thresholds=half)
            figures.later.append((now.moment, later[..., 0].amax(dim=0)))
        thresholds = candidates(scores, rows, self._level, block_tokens=tokens)
        measured = self._errors(q, k, v, scores, rows, scale=scale, thresholds=thresholds)
        place = loosest(measured, self._level.bound)[..., None]
        figures.found.append((now.moment, measured.gather(2, place)[..., 0].amax(dim=0)))
        return self._kept.keep(call, now, ~(scores <= thresholds.gather(2, place)[..., None]))  # NaN is active

    def select(
        self,
        layer: int,
        now: PassKey,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        always: tuple[TokenRange, ...] = (),
    ) -> BlockMask:
        """As `find`, by scores of means of q and k, and the block mask for the call itself; no wait for the device."""
        found = self.find(layer, now, q, k, v, block_scores(q, k, scale=scale), scale, always)
        found.was_used = True
        figures = self.figures[layer]
        figures.computed.append((now.moment, found.shares))
        figures.selected.append(figures.found[-1])
        return _block_mask(found.active())

    @property
    def all_figures(self) -> Figures:
        """Those of all layers together."""
        layers = list(self.figures.values())
        return Figures(
            [value for layer in layers for value in layer.computed],
            [value for layer in layers for value in layer.found],
            [value for layer in layers for value in layer.selected],
            [value for layer in layers for value in layer.later],
        )

    def forget(self, now: PassKey) -> None:
        """The pass `now` is made again: throw away what its evaluation found."""
        self._kept.forget(now)
        for figures in list(self.figures.values()):  # other threads may add to it
            figures.forget(now.moment)

    def clear(self) -> None:
        """Throw all blocks away; the figures stay."""
        self._kept.clear()


def _block_mask(active: torch.Tensor) -> BlockMask:
    """The lists of the active blocks, bool (1, Hq, Tq, Tk)."""
    return block_lists(active.float(), threshold=torch.full(active.shape[:2], 0.5, device=active.device))


def _cache_key(layer: int, now: PassKey, q: torch.Tensor, k: torch.Tensor) -> CacheKey:
    return CacheKey(layer, q.shape[1], q.shape[2], k.shape[2], q.device, frozenset(change for change, _ in now.changes))


def values(figures: Iterable[Figure]) -> list[list[float]]:
    """What the tensors hold, a list of one number a head each, in no stated order; waits for each device once."""
    by_form: defaultdict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
    for _, tensor in figures:
        by_form[tensor.device, len(tensor)].append(tensor)
    return [value for found in by_form.values() for value in torch.stack(found).tolist()]
