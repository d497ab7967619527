"""Times of attentions on one GPU as plain data, and whether they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..options import CHOICES, EXACT

# What ComfyUI's attention calls unless it was started with an option: torch chooses.
PLAIN = "scaled_dot_product_attention"
FEWEST_ROUNDS = 3
# Of a GPU that nobody else uses. One at its power limit varies by up to 0.05 from visit to visit.
_MOST_NOISE = 0.1
_MOST_DRIFT = 1.3
# What a document from outside may hold; beyond it a fit has no use, and with larger numbers no end.
_MOST_ROWS = 2000
_LARGEST_SIZE = 1 << 31
_SECONDS = (1e-9, 1e4)
_NORMAL = 1.4826  # standard deviation / median absolute deviation of normal data


@dataclass(frozen=True)
class Candidate:
    """A backend, or PLAIN, with the options that its time depends on."""

    backend: str
    mode: str = EXACT
    pv_accumulator: str = "fp32"

    @property
    def words(self) -> str:
        """For the user."""
        if self.backend == PLAIN:
            return "ComfyUI's own"
        if self.mode == EXACT:
            return self.backend
        return self.mode + (" with FP16 accumulators" if self.pv_accumulator == "fp16" else "")


@dataclass(frozen=True)
class Work:
    """The size of a call: heads of the whole batch, tokens of q and of k, head_dim."""

    heads: int
    q_length: int
    kv_length: int
    head_dim: int
    is_causal: bool = False

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


@dataclass(frozen=True)
class Times:
    """The median seconds of each call, and the noise: the relative standard deviation of one round."""

    seconds: Mapping[tuple[Candidate, Work], float]
    noise: float

    @classmethod
    def of(cls, rounds: Rounds) -> Times | None:
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
        return cls(middle, noise)

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        rows = [
            [one.backend, one.mode, one.pv_accumulator, work.heads, work.q_length, work.kv_length, work.head_dim, value]
            for (one, work), value in self.seconds.items()
        ]
        return {"noise": self.noise, "seconds": rows}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Times | None:
        """The times of a `document` from outside; None when it is not what `document` writes."""
        noise, rows = document.get("noise"), document.get("seconds")
        if not _is_number(noise, 0.0, _MOST_NOISE) or not isinstance(rows, list) or not 0 < len(rows) <= _MOST_ROWS:
            return None
        seconds = {}
        for row in rows:
            if not _is_row(row):
                return None
            seconds[Candidate(*row[:3]), Work(*row[3:7])] = float(row[7])
        return cls(seconds, float(noise))  # type: ignore[arg-type]


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 8:
        return False
    backend, mode, accumulator, *sizes, seconds = row
    return (
        all(isinstance(text, str) for text in (backend, mode, accumulator))
        and mode in CHOICES["mode"]
        and accumulator in CHOICES["pv_accumulator"]
        and all(isinstance(size, int) and _is_number(size, 1, _LARGEST_SIZE) for size in sizes)
        and _is_number(seconds, *_SECONDS)
    )


def _is_number(value: object, least: float, most: float) -> bool:
    """Whether `value` is one within these limits, which a NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
