"""One shape: time and extra memory of every candidate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .accuracy import make_inputs
from .candidates import BenchmarkCandidate, Inputs, PreparedCandidate
from .kernel_times import KernelTimer
from .shapes import Shape
from .timing import RoundMedian, time_in_rounds

# The fixed time of each shape, however small, as operations: used to divide the time among the shapes.
_FIXED_OPERATIONS = 1e13
_CPU_BOUND = 0.9


@dataclass(frozen=True)
class CandidateSpeed:
    """A candidate on one shape: milliseconds of the whole call and of the kernel, None if unknown.

    cpu_ms: the CPU's time to enqueue a call; if it is not below the call's time, the CPU is what was measured.
    peak: the most bytes beyond the inputs, in multiples of the output's in 16 bits: 1 is the output alone.
    """

    call: RoundMedian | None
    kernel: RoundMedian | None
    cpu_ms: float | None = None
    peak: float | None = None
    rounds: int = 0

    @property
    def is_cpu_bound(self) -> bool:
        """Whether the CPU cannot enqueue calls as fast as the GPU runs them."""
        return self.call is not None and self.cpu_ms is not None and self.cpu_ms > _CPU_BOUND * self.call.median


@dataclass(frozen=True)
class ShapeResult:
    """All candidates on one shape, and candidate -> reason for those that failed."""

    shape: Shape
    speeds: dict[str, CandidateSpeed]
    failures: dict[str, str]


def shares(shapes: Sequence[Shape], seconds: float, clock: Callable[[], float]) -> Iterator[tuple[Shape, float]]:
    """Each shape with its part, by the work that it takes, of what is left of `seconds` when its turn comes."""
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
        except Exception as error:  # whatever a peer's package raises is its result
            failures[candidate.name] = f"{type(error).__name__}: {error}"
    return subjects, failures


def peak_bytes(run: Callable[[], torch.Tensor]) -> int:
    """The most bytes that one call needs from torch, including its output."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    held_already = after == before  # the output was allocated beforehand, as with cuDNN's graphs
    return torch.cuda.max_memory_allocated() - before + (out.nbytes if held_already else 0)


def _peak(subject: PreparedCandidate, shape: Shape) -> float | None:
    try:
        return peak_bytes(subject.call.run) / shape.output_bytes
    except torch.cuda.OutOfMemoryError:  # only this figure of the candidate is missing
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
    """Time the candidates on `shape` for about `seconds`, including compilation, in orders drawn from `rng`."""
    begin = time.monotonic()
    subjects, failures = prepare(shape, candidates, fresh_inputs(shape))
    whole = {candidate.name for candidate in candidates if candidate.has_whole_call}
    peaks = {name: _peak(subject, shape) for name, subject in subjects.items() if name in whole}
    timed = time_in_rounds(subjects, seconds - (time.monotonic() - begin), kernel_timer.measure, rng)
    speeds = {
        name: CandidateSpeed(
            call=RoundMedian.of(times.calls) if name in whole else None,
            kernel=RoundMedian.of(times.kernels),
            cpu_ms=times.cpu if name in whole else None,
            peak=peaks.get(name),
            rounds=len(times.calls),
        )
        for name, times in timed.items()
    }
    return ShapeResult(shape, speeds, failures)
