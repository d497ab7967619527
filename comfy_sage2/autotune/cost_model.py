"""Derives choices from times: accumulators, and the fastest attention for a call.

Every attention of a GPU is timed in some thirty calls of a few sizes. For each attention, head_dim and memory order, a
model with four terms is fitted to those times; it predicts the time of a call of any size. Two attentions are compared
by their models, or by the times themselves where the largest timed call says enough. A difference that the noise could
explain decides nothing: then the shipped defaults stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product
from statistics import geometric_mean
from typing import NamedTuple

import torch

from ..options import AUTO, EXACT
from .timings import ORDINARY, PEER, PLAIN, Candidate, ErrorsOfKinds, Times, Work

_LEAST_MARGIN = 0.02
# Another package's error may exceed ours by this factor: errors vary as much between draws of the inputs.
_EQUAL_ERRORS = 1.05
_NO_ATTENTION = 0.5  # an error that no working attention has: 4 bits have 0.16 on Gaussian inputs
_FORMAT_RATIO = 1.03  # a more exact format of P and V may take this times as long as the fastest one
_BLOCK = 128  # keys
# The queries of a tile, for torch's attentions too.
_TILE = 128
_TILES = {("sm90", "precise"): 192}


class CostModel(NamedTuple):
    """The seconds of a call: the sum of four counts, each multiplied by the seconds of one.

    The four terms are the launch, the two products, and work that touches each row of q, or of k and v, once, such as
    quantization.

    parts: seconds of a launch, of a pair of a query and a key, of a query, of a key.
    tiles: if known, idle multiprocessors in a call's last wave count as if they computed pairs.
    """

    parts: Sequence[float]
    tiles: Tiles | None = None

    def seconds(self, work: Work) -> float:
        return sum(part * count for part, count in zip(self.parts, _terms(work, self.tiles), strict=True))

    @classmethod
    def fitted(cls, times: dict[Work, float], tiles: Tiles | None = None) -> CostModel:
        """The model with the least sum of squared relative errors, among those without negative parts."""
        seconds = torch.tensor(list(times.values()), dtype=torch.float64)
        terms = torch.tensor([_terms(work, tiles) for work in times], dtype=torch.float64) / seconds[:, None]
        best, least = cls((0.0, 0.0, 0.0, 0.0), tiles), math.inf
        for used in _USED:
            if len(used) > len(times):
                continue
            # Scale the columns to equal size: pairs and calls differ by ten orders of magnitude.
            sizes = terms[:, used].norm(dim=0)
            rows = terms[:, used] / sizes
            solution = torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution
            error = float((rows @ solution - 1.0).square().sum())
            parts = (solution[:, 0] / sizes).tolist()
            if min(parts) >= 0.0 and error < least - 1e-9:
                part_of = dict(zip(used, parts, strict=True))
                best, least = cls([part_of.get(term, 0.0) for term in range(4)], tiles), error
        return best


class Tiles(NamedTuple):
    """The queries of a tile, which one multiprocessor computes by itself, and the number of multiprocessors."""

    queries: int
    multiprocessors: int

    def fill(self, work: Work) -> float:
        """The work of whole waves of tiles on all multiprocessors, relative to that of the queries alone: 1 or more."""
        count = work.heads * -(-work.q_length // self.queries)
        waves = -(-count // self.multiprocessors)
        return waves * self.multiprocessors * self.queries / (work.heads * work.q_length)


def _terms(work: Work, tiles: Tiles | None) -> tuple[float, float, float, float]:
    """The counts that the parts of a model are multiplied by. All kernels compute keys in whole blocks."""
    keys = -(-work.kv_length // _BLOCK) * _BLOCK / work.kv_length
    queries = 1.0 if tiles is None else tiles.fill(work)
    return 1.0, work.pairs * keys * queries, float(work.heads * work.q_length), work.heads * work.kv_length * keys


# The subsets of the terms that a model may have, the largest first. All contain the pairs.
_USED = [list(used) for count in (4, 3, 2, 1) for used in combinations(range(4), count) if 1 in used]


class TunedChoices:
    """The choices that follow from `times`, of calls of `head_dims`. A choice is None if the times decide nothing."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.margin = max(_LEAST_MARGIN, 2.0 * times.noise)
        by_model: dict[tuple[Candidate, int, tuple[bool, bool]], dict[Work, float]] = {}
        for (candidate, work), seconds in times.seconds.items():
            by_model.setdefault((candidate, work.head_dim, work.kind), {})[work] = seconds
        self._models = {key: CostModel.fitted(points, self._tiles(key[0])) for key, points in by_model.items()}
        self._candidates = list(dict.fromkeys(candidate for candidate, *_ in self._models))
        self.head_dims = sorted({head_dim for _, head_dim, _ in self._models})

    def seconds(self, candidate: Candidate, work: Work) -> float | None:
        """Predicted GPU seconds, by the model of the smallest timed head_dim that is not below the call's.

        If the candidate was not timed with V's smoothing or in this memory order, its model without smoothing or in the
        other order serves instead. Calls with a mask have no such substitute.
        """
        head_dim = self.timed_head_dim(work.head_dim)
        if head_dim is None:
            return None
        candidates = (candidate, replace(candidate, smooth_v=False))
        kinds = (work.kind, replace(work, heads_first=False).kind)
        for like, kind in product(candidates, kinds):
            model = self._models.get((like, head_dim, kind))
            if model is not None:
                return model.seconds(work)
        return None

    def _tiles(self, candidate: Candidate) -> Tiles | None:
        queries = _TILES.get((candidate.backend, candidate.mode), _TILE)
        return Tiles(queries, self.times.multiprocessors) if self.times.multiprocessors else None

    def timed_head_dim(self, head_dim: int) -> int | None:
        """The smallest measured head_dim that is not below `head_dim`."""
        return next((timed for timed in self.head_dims if timed >= head_dim), None)

    def error(self, candidate: Candidate, head_dim: int) -> float | None:
        """The relative L2 error of a candidate that quantizes, on Gaussian inputs."""
        errors = self._errors(candidate, head_dim)
        return errors[0] if errors else None

    def is_no_less_exact(self, candidate: Candidate, other: Candidate, head_dim: int) -> bool:
        """Whether the candidate's error is clearly above that of `other` for no kind of inputs; False if unknown."""
        errors, limits = self._errors(candidate, head_dim), self._errors(other, head_dim)
        if len(errors) != len(limits):
            return False
        # None: calls of a kind that the candidate does not take never reach it.
        pairs = [(error, limit) for error, limit in zip(errors, limits, strict=True) if error is not None]
        return bool(pairs) and all(limit is not None and error <= _EQUAL_ERRORS * limit for error, limit in pairs)

    def _errors(self, candidate: Candidate, head_dim: int) -> ErrorsOfKinds:
        timed = self.timed_head_dim(head_dim)
        return () if timed is None else self.times.errors.get((candidate, timed), ())

    @property
    def exact(self) -> list[Candidate]:
        """Torch's exact attentions that were timed, except PLAIN, which is ComfyUI's choice among them."""
        return [candidate for candidate in self._candidates if candidate.mode == EXACT and candidate.backend != PLAIN]

    @property
    def peers(self) -> list[Candidate]:
        return [candidate for candidate in self._candidates if candidate.mode == PEER and self._attends(candidate)]

    def _attends(self, peer: Candidate) -> bool:
        """Whether the peer's measured outputs were finite and close to those of attention."""
        errors = [error for head_dim in self.head_dims if (error := self.error(peer, head_dim)) is not None]
        return bool(errors) and max(errors) < _NO_ATTENTION

    def is_faster(self, candidate: Candidate, other: Candidate, work: Work) -> bool:
        """Whether many such calls in a row take clearly less time, by the GPU or the host, whichever is slower."""
        seconds, limit = self._seconds_in_a_row(candidate, work), self._seconds_in_a_row(other, work)
        return seconds is not None and limit is not None and seconds * (1.0 + self.margin) < limit

    def _seconds_in_a_row(self, candidate: Candidate, work: Work) -> float | None:
        seconds = self.seconds(candidate, work)
        return None if seconds is None else max(seconds, self._host(candidate) or 0.0)

    def is_lost_on_the_host(self, candidate: Candidate, other: Candidate, work: Work) -> bool:
        """Whether `candidate`, in place of `other`, saves less time of the GPU than it costs the host."""
        seconds, limit = self.seconds(candidate, work), self.seconds(other, work)
        if seconds is None or limit is None:
            return False
        host, other_host = self._host(candidate), self._host(other)
        lost = 0.0 if host is None or other_host is None else host - other_host
        return lost > max(limit - seconds, self.margin * limit)

    def _host(self, candidate: Candidate) -> float | None:
        host = self.times.host
        return host.get(candidate, host.get(replace(candidate, smooth_v=False)))

    def fastest_first(self, backends: Iterable[str], work: Work) -> list[str]:
        """Names of exact attentions by their time; those that were not timed come last, in their own order."""
        return sorted(backends, key=lambda backend: self.seconds(Candidate(backend), work) or math.inf)

    def accumulator(self, mode: str) -> str | None:
        """The faster accumulators for `mode`, by the geometric mean over the long calls."""
        logs = []
        for half in self._candidates:
            if half.mode == mode and half.pv_accumulator == "fp16":
                full = replace(half, pv_accumulator="fp32")
                for work in map(self.long_call, self.head_dims):
                    pair = self.times.seconds.get((half, work)), self.times.seconds.get((full, work))
                    if pair[0] is not None and pair[1] is not None:
                        logs.append(math.log(pair[0] / pair[1]))
        mean = sum(logs) / max(len(logs), 1)
        if abs(mean) <= math.log(1.0 + self.margin):
            return None
        return "fp16" if mean < 0.0 else "fp32"

    def pv_format(self, mode: str) -> str | None:
        """The most exact of the formats of P and V within 3 % of the fastest one, by each head_dim's longest call.

        None unless at least two formats were timed.
        """
        times: dict[str, float] = {}
        errors: dict[str, float] = {}
        for candidate in self._candidates:
            works = [(candidate, self.long_call(head_dim)) for head_dim in self.head_dims]
            if (candidate.mode, candidate.rotate, candidate.smooth_v) != (mode, False, False):
                continue
            known = [error for head_dim in self.head_dims for error in self._errors(candidate, head_dim) if error]
            if candidate.pv == AUTO or not known or not all(work in self.times.seconds for work in works):
                continue
            seconds = math.prod(self.times.seconds[work] for work in works)
            if seconds < times.get(candidate.pv, math.inf):
                times[candidate.pv], errors[candidate.pv] = seconds, geometric_mean(known)
        most = _FORMAT_RATIO ** len(self.head_dims) * min(times.values(), default=0.0)
        close = [pv for pv, seconds in times.items() if seconds <= most]
        return min(close, key=errors.__getitem__) if len(times) > 1 else None

    def fastest_of(self, mode: str, work: Work, *, rotate: bool, pv_accumulator: str | None) -> Candidate | None:
        """The fastest candidate of `mode` in `work` that does not smooth V; None takes the faster accumulators."""
        timed = {
            candidate: seconds
            for (candidate, size), seconds in self.times.seconds.items()
            if size == work
            and (candidate.mode, candidate.rotate, candidate.smooth_v) == (mode, rotate, False)
            and pv_accumulator in (None, candidate.pv_accumulator)
        }
        return min(timed, key=timed.__getitem__, default=None)

    def long_call(self, head_dim: int) -> Work:
        """The timed call with the most pairs, in usual order without a mask: it says most about the products."""
        works = [work for _, work in self.times.seconds if work.head_dim == head_dim]
        works = [work for work in works if work.kind == ORDINARY] or works
        return max(works, key=lambda work: work.pairs)

    def lines(self) -> list[str]:
        """In words, the speeds and errors of the longest call of each head_dim by candidates that do not smooth V."""
        lines = []
        for head_dim in self.head_dims:
            work = self.long_call(head_dim)
            seconds_of = {
                candidate: seconds
                for (candidate, size), seconds in self.times.seconds.items()
                if size == work and not candidate.smooth_v
            }
            if not seconds_of:
                continue
            speeds = []
            for candidate, seconds in seconds_of.items():
                formats = {other.pv for other in self._candidates if other.mode == candidate.mode}
                name = f"{candidate.words} ({candidate.pv.upper()})" if len(formats) > 1 else candidate.words
                error = self.error(candidate, head_dim)
                beside = "" if error is None else f" ({error:.3f})"
                speeds.append(f"{name} {work.teraflops(seconds):.0f}{beside}")
            has_errors = any(self._errors(candidate, head_dim) for candidate in seconds_of)
            unit = "TFLOP/s (relative L2 error)" if has_errors else "TFLOP/s"
            fastest = min(seconds_of, key=seconds_of.__getitem__)
            calls = f"head_dim {head_dim}, {work.q_length} tokens, {unit}"
            lines.append(f"{calls}: {', '.join(speeds)}; the fastest is {fastest.words}")
        return lines
