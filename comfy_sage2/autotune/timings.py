"""Times of attentions on one GPU as plain data, and whether they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Any

import torch

from ..call.signature import CallSignature
from ..options import AUTO, EXACT, AttentionOptions

# What ComfyUI calls unless an option at its start chooses another attention: torch picks one.
PLAIN = "scaled_dot_product_attention"
REFERENCE = "reference"  # the backend that computes what kernels would: its errors are measured, it is never timed
PEER = "peer"  # the mode of another package's attention, which quantizes in its own way
ORDINARY = (False, False)  # `Work.kind` of calls without a mask, the heads of a token together in memory
ROTATIONS = (False, True)  # the values of `Candidate.rotate`
FEWEST_ROUNDS = 3
# Limits for a GPU that no other process uses. At its power limit, times vary by up to 0.05 from visit to visit.
_MOST_NOISE = 0.1
_MOST_DRIFT = 1.3
_NORMAL = 1.4826  # standard deviation / median absolute deviation of normal data
# Limits of what is read from a file: the cost model cannot be fitted to larger or smaller numbers.
_SECONDS = (1e-9, 1e4)
_LARGEST_ERROR = torch.finfo(torch.float32).max  # the outputs of a broken package may be anything
_MOST_MULTIPROCESSORS = 10000


@dataclass(frozen=True)
class Candidate:
    """A backend, or PLAIN, with the options that its time depends on; the mode is of `AttentionOptions`, or PEER.

    `rotate` is True for "on", "given" and "auto", which takes at most as long. `pv` is AUTO if there is no choice.
    """

    backend: str
    mode: str = EXACT
    pv_accumulator: str = "fp32"
    rotate: bool = False
    smooth_v: bool = False
    pv: str = AUTO

    @classmethod
    def of(cls, backend: str, options: AttentionOptions) -> Candidate:
        """The candidate that stands for calls by `backend` with these `options`, which are settled."""
        smooth_v = options.smooth_v and options.mode != "precise"  # which does not quantize V
        rotate = options.mode != EXACT and options.rotate != "off"
        return cls(backend, options.mode, options.pv_accumulator, rotate, smooth_v, options.pv)

    @property
    def words(self) -> str:
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
    """The size of a call and what else its time depends on; `heads` counts those of the whole batch.

    heads_first: the tokens of a head lie together in memory, (B, H, N, D), else the heads of a token.
    hides_keys: a mask hides keys, the same ones from all queries and heads.
    """

    heads: int
    q_length: int
    kv_length: int
    head_dim: int
    is_causal: bool = False
    heads_first: bool = False
    hides_keys: bool = False

    @classmethod
    def of(cls, signature: CallSignature) -> Work | None:
        """None for block masks, float32, and masks that differ between queries or heads, whose times are unknown."""
        mask = signature.mask_shape
        if signature.block_mask is not None or signature.dtype == torch.float32:
            return None
        if mask is not None and mask[1:3] != (1, 1):
            return None
        return cls(
            signature.batch * signature.q_heads,
            signature.q_length,
            signature.kv_length,
            signature.head_dim,
            signature.options.is_causal,
            signature.heads_first,
            mask is not None,
        )

    @property
    def kind(self) -> tuple[bool, bool]:
        """What the calls of one cost model have in common: their memory order, and whether a mask hides keys."""
        return self.heads_first, self.hides_keys

    @property
    def pairs(self) -> float:
        return self.heads * self.q_length * self.kv_length * (0.5 if self.is_causal else 1.0)

    def teraflops(self, seconds: float) -> float:
        """10^12 operations a second; a pair takes 4 head_dim operations."""
        return 4e-12 * self.head_dim * self.pairs / seconds


Rounds = Mapping[tuple[Candidate, Work], Sequence[float]]  # seconds of a call in each round
# The relative L2 error of a candidate that quantizes, against exact attention, for each kind of inputs; Gaussian ones
# come first. None for a kind that the candidate does not take.
ErrorsOfKinds = tuple[float | None, ...]
Errors = Mapping[tuple[Candidate, int], ErrorsOfKinds]  # the number is head_dim


@dataclass(frozen=True)
class Times:
    """The times of a GPU: median seconds of calls, their relative noise in a round, errors of candidates that quantize,
    and `host`, the seconds for which a call occupies its thread. multiprocessors: 0 if unknown.
    """

    seconds: Mapping[tuple[Candidate, Work], float]
    noise: float
    errors: Errors = field(default_factory=dict)
    host: Mapping[Candidate, float] = field(default_factory=dict)
    multiprocessors: int = 0

    @classmethod
    def of(
        cls,
        rounds: Rounds,
        errors: Errors | None = None,
        host: Mapping[Candidate, float] | None = None,
        multiprocessors: int = 0,
    ) -> Times | None:
        """None if the rounds are too few or differ too much: another process may be using the GPU."""
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
        return cls(middle, noise, errors or {}, host or {}, multiprocessors)

    def document(self) -> dict[str, Any]:
        works = list(dict.fromkeys(work for _, work in self.seconds))
        candidates = dict.fromkeys(candidate for candidate, _ in (*self.seconds, *self.errors))
        return {
            "noise": self.noise,
            "multiprocessors": self.multiprocessors,
            "calls": [list(astuple(work)) for work in works],
            "candidates": [
                {
                    "candidate": list(astuple(candidate)),
                    "seconds": [self.seconds.get((candidate, work)) for work in works],
                    "host": self.host.get(candidate),
                    "errors": {str(head_dim): list(e) for (of, head_dim), e in self.errors.items() if of == candidate},
                }
                for candidate in candidates
            ],
        }

    @classmethod
    def read(cls, document: Mapping[str, Any], candidates: Iterable[Candidate], works: Iterable[Work]) -> Times | None:
        """The times in `document`; None unless all of it is of the form that `Times.document` gives, and names only
        these candidates and works.
        """
        candidate_of = {astuple(candidate): candidate for candidate in candidates}
        work_of = {astuple(work): work for work in works}
        seconds: dict[tuple[Candidate, Work], float] = {}
        errors: dict[tuple[Candidate, int], ErrorsOfKinds] = {}
        host: dict[Candidate, float] = {}
        try:
            timed = [work_of[tuple(values)] for values in document["calls"]]
            for row in document["candidates"]:
                candidate = candidate_of[tuple(row["candidate"])]
                for work, value in zip(timed, row["seconds"], strict=True):
                    if value is not None:
                        seconds[candidate, work] = _number(value, *_SECONDS)
                if row["host"] is not None:
                    host[candidate] = _number(row["host"], *_SECONDS)
                for head_dim, values in row["errors"].items():
                    errors[candidate, int(head_dim)] = tuple(
                        None if value is None else _number(value, 0.0, _LARGEST_ERROR) for value in values
                    )
            noise = _number(document["noise"], 0.0, _MOST_NOISE)
            multiprocessors = int(_number(document["multiprocessors"], 0, _MOST_MULTIPROCESSORS))
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        return cls(seconds, noise, errors, host, multiprocessors) if seconds else None


def _number(value: Any, least: float, most: float) -> float:
    """`value` as a float; ValueError if it is outside these limits or NaN."""
    if not least <= value <= most:
        raise ValueError(f"a number from {least} to {most} was expected, got {value!r}")
    return float(value)
