"""Times of calls on the GPU. Candidates take turns in rounds, so that clocks and temperature are alike for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from .candidates import Call, Candidate, Inputs
from .kernel_times import KernelTimer

_VISIT_SECONDS = 0.02  # the least that a candidate runs for in a round, so that short calls fill the GPU
_MOST_ITERATIONS = 50
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 9
_HEAD_START = 500_000  # GPU clocks, a quarter of a millisecond: what the host is ahead by when timing begins


@dataclass
class Timed:
    """What one candidate's rounds gave, in milliseconds a call."""

    calls: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)

    @property
    def call(self) -> float | None:
        """Median over rounds of the whole call, by CUDA events."""
        return median(self.calls) if self.calls else None

    @property
    def kernel(self) -> float | None:
        """Median over rounds of the attention kernels alone, by the profiler."""
        return median(self.kernels) if self.kernels else None


@dataclass(frozen=True)
class Subject:
    """A candidate's prepared calls for one shape.

    `kernel_call` is the one whose kernels, those with `kernel_name` in their name, are the attention proper.
    """

    call: Call
    kernel_call: Call
    kernel_name: str | None

    @classmethod
    def of(cls, candidate: Candidate, inputs: Inputs) -> Subject:
        """Prepare the candidate's calls and run each once: what they compile and cache is not timed."""
        call = candidate.prepare(inputs)
        call.run()
        kernel_call = call
        if candidate.prepare_kernel is not None:
            kernel_call = candidate.prepare_kernel(inputs)
            kernel_call.run()
        torch.cuda.synchronize()
        return cls(call, kernel_call, candidate.kernel_name)


def iterations(milliseconds: float) -> int:
    """How often a call of this length is repeated in a round."""
    return min(max(math.ceil(_VISIT_SECONDS * 1e3 / max(milliseconds, 1e-3)), 1), _MOST_ITERATIONS)


def milliseconds_of(run: Callable[[], torch.Tensor], repeats: int) -> float:
    """The mean time of `repeats` calls in a row, by CUDA events on the current stream.

    The GPU waits before it begins, so that the first call's way through Python is not counted as the GPU's time.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def time_in_rounds(
    subjects: Mapping[str, Subject],
    seconds: float,
    kernel_timer: KernelTimer,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Timed]:
    """Time each subject in rounds in which every one has its turn, until `seconds` are used up: 2 to 9 rounds.

    A round times the whole calls with CUDA events, then the kernels with the profiler.
    """
    begin = clock()
    repeats = {name: iterations(milliseconds_of(subject.call.run, 1)) for name, subject in subjects.items()}
    results = {name: Timed() for name in subjects}
    for finished in range(1, _MOST_ROUNDS + 1):
        round_begin = clock()
        for name, subject in subjects.items():
            results[name].calls.append(milliseconds_of(subject.call.run, repeats[name]))
        for name, kernel_time in kernel_timer.measure(subjects, repeats).items():
            results[name].kernels.append(kernel_time)
        now = clock()
        if finished >= _FEWEST_ROUNDS and now + (now - round_begin) > begin + seconds:
            break
    return results
