"""One shape: time and extra memory of every candidate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .accuracy import make_inputs
from .candidates import BenchmarkCandidate, Inputs, PeerMissing, PreparedCandidate
from .kernel_times import KernelTimer
from .memory import extra_bytes
from .shapes import Shape
from .timing import RoundMedian, time_in_rounds

# Work that takes time for every shape, however small it is, in operations: used to share out the time.
_FIXED_OPERATIONS = 1e13
_CPU_BOUND = 0.9


@dataclass(frozen=True)
class CandidateSpeed:
    """A candidate on one shape: milliseconds of the whole call and of the kernel, None where there is nothing to say.

    cpu_ms: what enqueuing a call takes; where it is not below the call's time, the CPU is what was measured.
    extra_memory: bytes beyond inputs and output / bytes of q, k and v in 16 bits.
    """

    shape: Shape
    candidate: str
    call: RoundMedian | None
    kernel: RoundMedian | None
    cpu_ms: float | None
    extra_memory: float | None
    rounds: int

    @property
    def is_cpu_bound(self) -> bool:
        """Whether the CPU cannot enqueue calls as fast as the GPU runs them."""
        return self.call is not None and self.cpu_ms is not None and self.cpu_ms > _CPU_BOUND * self.call.median


@dataclass(frozen=True)
class ShapeResult:
    """All candidates on one shape, and candidate -> reason for those that failed."""

    shape: Shape
    speeds: list[CandidateSpeed]
    failures: dict[str, str]


def shares(shapes: Sequence[Shape], seconds: float, clock: Callable[[], float]) -> Iterator[tuple[Shape, float]]:
    """Each shape with its part of what is then left of `seconds`, by the work that it takes."""
    end = clock() + seconds
    weights = [shape.operations + _FIXED_OPERATIONS for shape in shapes]
    for index, shape in enumerate(shapes):
        yield shape, max(end - clock(), 0.0) * weights[index] / sum(weights[index:])


def prepare(
    shape: Shape, candidates: Sequence[BenchmarkCandidate], inputs: Inputs
) -> tuple[dict[str, PreparedCandidate], dict[str, str]]:
    """The candidates that can run this shape, ready to be timed, and for the others candidate -> reason."""
    subjects: dict[str, PreparedCandidate] = {}
    failures: dict[str, str] = {}
    for candidate in candidates:
        if not candidate.applies(shape):
            continue
        try:
            subjects[candidate.name] = PreparedCandidate.of(candidate, inputs)
        except PeerMissing as reason:
            failures[candidate.name] = str(reason)
        except Exception as error:  # whatever a peer's package raises is its result
            failures[candidate.name] = f"{type(error).__name__}: {error}"
    return subjects, failures


def _extra_memory(subject: PreparedCandidate, shape: Shape) -> float | None:
    try:
        return extra_bytes(subject.call.run) / shape.qkv_bytes
    except torch.cuda.OutOfMemoryError:  # the figure is missing then, not the candidate
        return None


def fresh_inputs(shape: Shape) -> Inputs:
    """Gaussian inputs, the same for every run of the command."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    return make_inputs(shape)


def measure(
    shape: Shape,
    candidates: Sequence[BenchmarkCandidate],
    seconds: float,
    kernel_timer: KernelTimer,
    rng: random.Random,
) -> ShapeResult:
    """Time the candidates on `shape` for about `seconds`, what they compile included, in orders drawn from `rng`."""
    begin = time.monotonic()
    subjects, failures = prepare(shape, candidates, fresh_inputs(shape))
    whole = {candidate.name for candidate in candidates if candidate.has_whole_call}
    memory = {name: _extra_memory(subject, shape) for name, subject in subjects.items() if name in whole}
    timed = time_in_rounds(subjects, seconds - (time.monotonic() - begin), kernel_timer, rng)
    speeds = [
        CandidateSpeed(
            shape=shape,
            candidate=name,
            call=RoundMedian.of(found.calls) if name in whole else None,
            kernel=RoundMedian.of(found.kernels),
            cpu_ms=found.cpu if name in whole else None,
            extra_memory=memory.get(name),
            rounds=len(found.calls),
        )
        for name, found in timed.items()
    ]
    return ShapeResult(shape, speeds, failures)
