"""Times of attentions on one GPU as plain data, and whether they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Any

from ..options import EXACT, AttentionOptions

# What ComfyUI's attention calls unless it was started with an option: torch chooses.
PLAIN = "scaled_dot_product_attention"
PEER = "peer"  # in the place of a mode: another package's attention, which quantizes in its own way
ORDINARY = (False, False)  # `Work.kind` of calls without a mask, the heads of a token together in memory
ROTATIONS = (False, True)  # of a candidate's `rotate`, those that are timed
FEWEST_ROUNDS = 3
# Of a GPU that nobody else uses. One at its power limit varies by up to 0.05 from visit to visit.
_MOST_NOISE = 0.1
_MOST_DRIFT = 1.3
# What a document from outside may hold; beyond it a fit has no use, and with larger numbers no end.
_MOST_TIMES = 20000
_MOST_HEAD_DIMS, _MOST_CANDIDATES = 8, 60  # ours have 2 and some 30
_LARGEST_SIZE = 1 << 31
_SECONDS = (1e-9, 1e4)
_LARGEST_ERROR = 1e6
_NORMAL = 1.4826  # standard deviation / median absolute deviation of normal data


@dataclass(frozen=True)
class Candidate:
    """A backend, or PLAIN, with the options of `AttentionOptions` that its time depends on; the mode may be PEER.

    rotate: "on", and "auto" too, which rotates at most all heads.
    """

    backend: str
    mode: str = EXACT
    pv_accumulator: str = "fp32"
    rotate: bool = False
    smooth_v: bool = False

    @classmethod
    def of(cls, backend: str, options: AttentionOptions) -> Candidate:
        """What a call by `backend` is timed as; the accumulators of `options` are decided."""
        smooth_v = options.smooth_v and options.mode != "precise"  # where nothing is smoothed
        rotate = options.mode != EXACT and options.rotate != "off"
        return cls(backend, options.mode, options.pv_accumulator, rotate, smooth_v)

    @property
    def is_quantized(self) -> bool:
        """Whether the result is less exact than that of 16-bit attention."""
        return self.mode != EXACT

    @property
    def words(self) -> str:
        """For the user."""
        if self.backend == PLAIN:
            return "ComfyUI's own"
        if self.mode in (EXACT, PEER):
            return self.backend
        added = ["rotation"] if self.rotate else []
        added += ["smooth V"] if self.smooth_v else []
        added += ["FP16 accumulators"] if self.pv_accumulator == "fp16" else []
        return f"{self.mode} with {' and '.join(added)}" if added else self.mode


@dataclass(frozen=True)
class Work:
    """The size of a call and what else its time depends on.

    Attributes:
        heads: of the whole batch.
        q_length, kv_length: tokens of q and of k.
        head_dim: channels of a head.
        is_causal: half of the pairs do not count.
        heads_first: in memory the tokens of a head lie together, (B, H, N, D), else the heads of a token.
        hides_keys: a mask hides keys, the same ones from all queries and heads.
    """

    heads: int
    q_length: int
    kv_length: int
    head_dim: int
    is_causal: bool = False
    heads_first: bool = False
    hides_keys: bool = False

    @property
    def kind(self) -> tuple[bool, bool]:
        """What calls have in common that one cost model fits: their order in memory, and the mask."""
        return self.heads_first, self.hides_keys

    @property
    def pairs(self) -> float:
        """Of a query and a key, over all heads."""
        return self.heads * self.q_length * self.kv_length * (0.5 if self.is_causal else 1.0)

    @property
    def queries(self) -> int:
        """Rows of q, over all heads."""
        return self.heads * self.q_length

    @property
    def keys(self) -> int:
        """Rows of k, as many heads as q has."""
        return self.heads * self.kv_length

    def teraflops(self, seconds: float) -> float:
        """10^12 operations a second, of which a pair takes 4 head_dim."""
        return 4e-12 * self.head_dim * self.pairs / seconds


Rounds = Mapping[tuple[Candidate, Work], Sequence[float]]  # seconds of a call in each round
# Relative L2 of a candidate that quantizes, beside exact attention: one for each kind of inputs, Gaussian ones first.
# None for a kind that it does not take.
ErrorsOfKinds = tuple[float | None, ...]
Errors = Mapping[tuple[Candidate, int], ErrorsOfKinds]  # the number is head_dim


@dataclass(frozen=True)
class Times:
    """The median seconds of each call, the noise, which is the relative standard deviation of one round, and errors."""

    seconds: Mapping[tuple[Candidate, Work], float]
    noise: float
    errors: Errors = field(default_factory=dict)

    @classmethod
    def of(cls, rounds: Rounds, errors: Errors | None = None) -> Times | None:
        """None when the rounds are too few or differ too much: another process may load the GPU."""
        counts = {len(values) for values in rounds.values()}
        if len(counts) != 1 or min(counts) < FEWEST_ROUNDS:
            return None
        if not all(math.isfinite(value) and value > 0.0 for values in rounds.values() for value in values):
            return None
        middle = {key: median(values) for key, values in rounds.items()}
        deviations = [median(abs(value / middle[key] - 1.0) for value in values) for key, values in rounds.items()]
        noise = _NORMAL * median(deviations)
        slowness = [
            median(values[turn] / middle[key] for key, values in rounds.items()) for turn in range(counts.pop())
        ]
        if noise > _MOST_NOISE or max(slowness) > _MOST_DRIFT * min(slowness):
            return None
        return cls(middle, noise, errors or {})

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        works = list(dict.fromkeys(work for _, work in self.seconds))
        candidates = dict.fromkeys(candidate for candidate, _ in self.seconds)
        return {
            "noise": self.noise,
            "calls": [list(astuple(work)) for work in works],
            "candidates": [
                {
                    "candidate": list(astuple(one)),
                    "seconds": [self.seconds.get((one, work)) for work in works],
                    "errors": {str(head_dim): list(e) for (other, head_dim), e in self.errors.items() if other == one},
                }
                for one in candidates
            ],
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Times | None:
        """The times of a `document` from outside; None when it is not what `document` writes."""
        noise, calls, rows = document.get("noise"), document.get("calls"), document.get("candidates")
        if not _is_number(noise, 0.0, _MOST_NOISE) or not isinstance(calls, list) or not isinstance(rows, list):
            return None
        if len(calls) * len(rows) > _MOST_TIMES or len(rows) > _MOST_CANDIDATES:
            return None
        works = [_work(values) for values in calls]
        if len({work.head_dim for work in works if work is not None}) > _MOST_HEAD_DIMS:
            return None
        seconds: dict[tuple[Candidate, Work], float] = {}
        errors: dict[tuple[Candidate, int], ErrorsOfKinds] = {}
        for row in map(_row, rows):
            if row is None or len(row[1]) != len(works) or None in works:
                return None
            one, times, found = row
            seconds |= {(one, work): float(t) for work, t in zip(works, times, strict=True) if work and t is not None}
            errors |= {(one, int(head_dim)): tuple(values) for head_dim, values in found.items()}
        return cls(seconds, float(noise), errors) if seconds else None  # type: ignore[arg-type]


def _work(values: object) -> Work | None:
    """The call that a list from outside names."""
    if not isinstance(values, list) or len(values) != 7:
        return None
    sizes, flags = values[:4], values[4:]
    is_sized = all(isinstance(size, int) and _is_number(size, 1, _LARGEST_SIZE) for size in sizes)
    return Work(*values) if is_sized and all(isinstance(flag, bool) for flag in flags) else None


def _row(row: object) -> tuple[Candidate, list[Any], dict[str, Any]] | None:
    """A candidate from outside, its seconds and errors; None when something in it is wrong."""
    if not isinstance(row, dict) or row.keys() != {"candidate", "seconds", "errors"}:
        return None
    one, seconds, errors = _candidate(row["candidate"]), row["seconds"], row["errors"]
    if one is None or not isinstance(errors, dict) or not _are_numbers(seconds, *_SECONDS):
        return None
    if not all(head_dim.isdecimal() and len(head_dim) < 5 for head_dim in errors):
        return None
    return (one, seconds, errors) if all(_are_numbers(e, 0.0, _LARGEST_ERROR) for e in errors.values()) else None


def _are_numbers(values: object, least: float, most: float) -> bool:
    """Whether `values` is a list of numbers within these limits, with None where there is none."""
    return isinstance(values, list) and all(value is None or _is_number(value, least, most) for value in values)


def _candidate(values: object) -> Candidate | None:
    """The candidate that a list from outside names."""
    if not isinstance(values, list) or len(values) != 5 or not isinstance(values[0], str):
        return None
    backend, mode, accumulator, rotate, smooth_v = values
    if mode == PEER:
        one = Candidate(backend, PEER)
        return one if values == list(astuple(one)) else None
    if not isinstance(rotate, bool):
        return None
    try:
        rotation = "on" if rotate else "off"
        options = AttentionOptions(mode, smooth_v=smooth_v, pv_accumulator=accumulator, rotate=rotation)
    except (TypeError, ValueError):
        return None
    return None if accumulator == "auto" else Candidate.of(backend, options)


def _is_number(value: object, least: float, most: float) -> bool:
    """Whether `value` is one within these limits, which a NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
