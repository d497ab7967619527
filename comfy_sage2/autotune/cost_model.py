"""From times to choices: accumulators, order of the modes, and which attention is the fastest for a call.

A difference that the noise could explain decides nothing: then the shipped defaults stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..options import EXACT
from .timings import ORDINARY, PEER, ROTATIONS, Candidate, ErrorsOfKinds, Times, Work

_LEAST_MARGIN = 0.02
# Another package's error may be above ours by so much: by as much errors vary from draw to draw of the inputs.
_EQUAL_ERRORS = 1.05
# 4 bits must be this much faster than 8 to be worth what they cost in accuracy.
FOUR_BITS_PAY = 1.25
_BLOCK = 128  # keys
_LONGEST = 1 << 17  # tokens, up to which a crossover is looked for


@dataclass(frozen=True)
class CostModel:
    """Seconds of a call: fixed + per_pair * pairs + per_query * queries + per_key * keys, for what all calls cost, Q K
    and P V, and what touches each row of q or of k and v once, such as the quantization.
    """

    fixed: float
    per_pair: float
    per_query: float
    per_key: float

    def seconds(self, work: Work) -> float:
        """What a call of this size takes."""
        _, pairs, queries, keys = _terms(work)
        return self.fixed + self.per_pair * pairs + self.per_query * queries + self.per_key * keys

    @classmethod
    def fitted(cls, times: dict[Work, float]) -> CostModel:
        """The model with the least squared relative error of those whose parts are not negative."""
        seconds = torch.tensor(list(times.values()), dtype=torch.float64)
        terms = torch.tensor([_terms(work) for work in times], dtype=torch.float64) / seconds[:, None]
        best, least = cls(0.0, 0.0, 0.0, 0.0), math.inf
        for used in _USED:
            if len(used) > len(times):
                continue
            # Columns of equal size: pairs and calls differ by ten orders of magnitude.
            sizes = terms[:, used].norm(dim=0)
            rows = terms[:, used] / sizes
            solution = torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution
            error = float((rows @ solution - 1.0).square().sum())
            parts = (solution[:, 0] / sizes).tolist()
            if min(parts) >= 0.0 and error < least - 1e-9:
                found = dict(zip(used, parts, strict=True))
                best, least = cls(*(found.get(term, 0.0) for term in range(4))), error
        return best


def _terms(work: Work) -> tuple[float, float, float, float]:
    """Keys count in whole blocks: all kernels compute them so."""
    fill = -(-work.kv_length // _BLOCK) * _BLOCK / work.kv_length
    return 1.0, work.pairs * fill, float(work.queries), work.keys * fill


# The terms that a model has, the most first. All have the pairs.
_USED = [
    used for count in (4, 3, 2, 1) for used in map(list, itertools.combinations(range(4), count)) if 1 in used
]  # fmt: skip


class TunedChoices:
    """What follows from `times`; answers None where they decide nothing."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.margin = max(_LEAST_MARGIN, 2.0 * times.noise)
        by_model: dict[tuple[Candidate, int, tuple[bool, bool]], dict[Work, float]] = {}
        for (candidate, work), seconds in times.seconds.items():
            by_model.setdefault((candidate, work.head_dim, work.kind), {})[work] = seconds
        self._models = {key: CostModel.fitted(points) for key, points in by_model.items()}
        self._candidates = list(dict.fromkeys(candidate for candidate, *_ in self._models))
        self._head_dims = sorted({head_dim for _, head_dim, _ in self._models})

    def seconds(self, candidate: Candidate, work: Work) -> float | None:
        """What a call takes by the model of the smallest head_dim that was timed and is not below the call's.

        Where calls in its order in memory were not timed, the other order stands for them, and those that do not
        smooth V for those that do; nothing stands for calls with a mask.
        """
        head_dim = self._timed_head_dim(work.head_dim)
        if head_dim is None:
            return None
        for like, kind in itertools.product(
            (candidate, replace(candidate, smooth_v=False)), (work.kind, replace(work, heads_first=False).kind)
        ):
            model = self._models.get((like, head_dim, kind))
            if model is not None:
                return model.seconds(work)
        return None

    def _timed_head_dim(self, head_dim: int) -> int | None:
        """The smallest head_dim that was timed and is not below `head_dim`."""
        return next((found for found in self._head_dims if found >= head_dim), None)

    def error(self, candidate: Candidate, head_dim: int) -> float | None:
        """The relative L2 of a candidate that quantizes, on Gaussian inputs; None where it is not known."""
        found = self._errors(candidate, head_dim)
        return found[0] if found else None

    def is_no_less_exact(self, candidate: Candidate, other: Candidate, head_dim: int) -> bool:
        """Whether its error is on no kind of inputs clearly above that of `other`; False where one is unknown."""
        mine, others = self._errors(candidate, head_dim), self._errors(other, head_dim)
        if len(mine) != len(others):
            return False
        # Calls of a kind that it does not take never reach it.
        pairs = [(error, limit) for error, limit in zip(mine, others, strict=True) if error is not None]
        return bool(pairs) and all(limit is not None and error <= _EQUAL_ERRORS * limit for error, limit in pairs)

    def _errors(self, candidate: Candidate, head_dim: int) -> ErrorsOfKinds:
        timed = self._timed_head_dim(head_dim)
        return () if timed is None else self.times.errors.get((candidate, timed), ())

    @property
    def peers(self) -> list[Candidate]:
        """The attentions of other packages that were timed."""
        return [one for one in self._candidates if one.mode == PEER]

    def is_faster(self, candidate: Candidate, other: Candidate, work: Work) -> bool:
        """Whether `candidate` is faster than `other` by more than the noise; False where one was not timed."""
        mine, others = self.seconds(candidate, work), self.seconds(other, work)
        return mine is not None and others is not None and mine * (1.0 + self.margin) < others

    def fastest_first(self, backends: Iterable[str], work: Work) -> list[str]:
        """Names of exact attentions by their time; those that were not timed come last, in their own order."""

        def key(backend: str) -> float:
            seconds = self.seconds(Candidate(backend), work)
            return math.inf if seconds is None else seconds

        return sorted(backends, key=key)

    def accumulator(self, mode: str) -> str | None:
        """The faster accumulators for `mode`, or None."""
        ratios = []
        for half in self._candidates:
            if half.mode == mode and half.pv_accumulator == "fp16":
                ratios += self._long_ratios(half, replace(half, pv_accumulator="fp32"))
        ratio = _mean(ratios)
        if ratio is None or self._is_noise(ratio):
            return None
        return "fp16" if ratio < 1.0 else "fp32"

    def four_bits_pay(self) -> bool | None:
        """Whether 4 bits save enough time to give up accuracy for; None when a mode was not timed."""
        ratio = self._mode_ratio("4b", "8b")
        return None if ratio is None else ratio * FOUR_BITS_PAY <= 1.0

    def modes_by_speed(self, modes: Sequence[str]) -> tuple[str, ...]:
        """`modes`, each with its faster accumulators, the fastest first; their own order decides within the noise."""
        order: list[str] = []
        for mode in modes:
            place = len(order)
            while place and self._is_clearly_faster(mode, order[place - 1]):
                place -= 1
            order.insert(place, mode)
        return tuple(order)

    def crossover(self, candidate: Candidate, head_dim: int, heads: int) -> int | None:
        """The tokens of self-attention from which on `candidate` is no slower than any exact attention; None: never."""
        exact = [one for one in self._candidates if one.mode == EXACT]
        for power in itertools.count(7):
            length = 1 << power
            if length > _LONGEST:
                return None
            if self._is_fastest(candidate, exact, Work(heads, length, length, head_dim)):
                break
        slow, fast = length // 2 if power > 7 else 0, length
        while fast - slow > 16:
            middle = (slow + fast) // 2
            if self._is_fastest(candidate, exact, Work(heads, middle, middle, head_dim)):
                fast = middle
            else:
                slow = middle
        return fast

    def lines(self) -> list[str]:
        """The table in words: speeds and errors of the longest call of each head_dim, the fastest, and the crossovers.

        Smoothing V costs little, and has no place in it.
        """
        lines = []
        for head_dim in self._head_dims:
            work = self._long_call(head_dim)
            shown = {one: value for (one, at), value in self.times.seconds.items() if at == work and not one.smooth_v}
            speeds = [
                f"{one.words} {work.teraflops(value):.0f}{self._error_in_words(one, head_dim)}"
                for one, value in shown.items()
            ]
            known = any(self._errors(one, head_dim) for one in shown)
            unit = "TFLOP/s (relative L2 error)" if known else "TFLOP/s"
            text = f"head_dim {head_dim}, {work.q_length} tokens, {unit}: {', '.join(speeds)}"
            text += f"; the fastest is {min(shown, key=shown.__getitem__).words}"
            for rotate in ROTATIONS:
                text += self._crossover_in_words(work, rotate)
            lines.append(text)
        return lines

    def _error_in_words(self, candidate: Candidate, head_dim: int) -> str:
        error = self.error(candidate, head_dim)
        return "" if error is None else f" ({error:.3f})"

    def _crossover_in_words(self, work: Work, rotate: bool) -> str:
        """From how many tokens on 8b is faster than exact attention; empty where it was not timed so."""
        eight = self._fastest_of("8b", work, rotate=rotate, smooth_v=False)
        if eight is None:
            return ""
        length = self.crossover(eight, work.head_dim, work.heads)
        name = "8b with rotation" if rotate else "8b"
        if length is None:
            return f"; exact attention is always faster than {name}"
        return f"; {name} is faster than exact attention from {length} tokens"

    def _is_clearly_faster(self, mode: str, other: str) -> bool:
        ratio = self._mode_ratio(mode, other)
        return ratio is not None and ratio < 1.0 and not self._is_noise(ratio)

    def _is_noise(self, ratio: float) -> bool:
        return 1.0 / (1.0 + self.margin) <= ratio <= 1.0 + self.margin

    def _is_fastest(self, candidate: Candidate, others: list[Candidate], work: Work) -> bool:
        return not any(self.is_faster(other, candidate, work) for other in others)

    def _fastest_of(self, mode: str, work: Work, *, rotate: bool, smooth_v: bool) -> Candidate | None:
        """The candidate of `mode` with these options that took the least time for `work`."""
        found = {
            one: value
            for (one, at), value in self.times.seconds.items()
            if at == work and (one.mode, one.rotate, one.smooth_v) == (mode, rotate, smooth_v)
        }
        return min(found, key=found.__getitem__, default=None)

    def _mode_ratio(self, mode: str, other: str) -> float | None:
        """The time of a mode by that of another with the same options, over the long calls; None when not timed."""
        ratios = []
        for work, rotate in itertools.product(map(self._long_call, self._head_dims), ROTATIONS):
            mine, others = (self._fastest_of(one, work, rotate=rotate, smooth_v=False) for one in (mode, other))
            if mine is not None and others is not None:
                ratios.append(self.times.seconds[mine, work] / self.times.seconds[others, work])
        return _mean(ratios)

    def _long_ratios(self, candidate: Candidate, other: Candidate) -> list[float]:
        """The time of one by that of the other, for each of the long calls for which both were timed."""
        found, works = self.times.seconds, map(self._long_call, self._head_dims)
        return [
            found[candidate, work] / found[other, work]
            for work in works
            if (candidate, work) in found and (other, work) in found
        ]

    def _long_call(self, head_dim: int) -> Work:
        """The call with the most pairs, of those the one with the fewest tokens: it says most about the products."""
        works = [work for _, work in self.times.seconds if work.head_dim == head_dim]
        works = [work for work in works if work.kind == ORDINARY] or works
        return max(works, key=lambda work: (work.pairs, -work.queries - work.keys))


def _mean(ratios: list[float]) -> float | None:
    """The geometric mean, or None."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
