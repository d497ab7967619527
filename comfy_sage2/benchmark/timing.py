"""Times of calls on the GPU. Candidates take turns, in an order that is drawn anew in every round.

A card at its power limit remembers some 100 ms of what ran before. In a fixed order each candidate would always inherit
the heat of the same one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from .candidates import Call, Candidate, Inputs
from .kernel_times import KernelTimer
from .settle import heat

_VISIT_SECONDS = 0.02  # the least that a candidate runs for in a round, so that short calls fill the GPU
_MOST_ITERATIONS = 50
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 9
_HEAD_START = 500_000  # GPU clocks, a quarter of a millisecond: what the CPU is ahead by when timing begins
_PASS_HEAT_SECONDS = 0.1  # between two passes the GPU idles, while the profiler starts or is read


@dataclass(frozen=True)
class Visit:
    """One visit: milliseconds a call on the GPU, and what enqueuing a call took on the CPU."""

    gpu: float
    cpu: float


@dataclass
class Timed:
    """What one candidate's rounds gave, in milliseconds a call."""

    calls: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Rounds:
    """Median milliseconds over rounds; spread: (most - least) / median."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: list[float]) -> Rounds | None:
        """None when there is no value."""
        if not values:
            return None
        middle = median(values)
        return cls(middle, (max(values) - min(values)) / middle)


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


def visit(run: Callable[[], torch.Tensor], repeats: int) -> Visit:
    """The mean times of `repeats` calls in a row: by CUDA events on the current stream, and by the CPU's clock.

    The GPU waits before it begins, so that the first call's way through Python is not counted as the GPU's time.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)
    start.record()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    enqueued = time.perf_counter()
    end.record()
    end.synchronize()
    return Visit(start.elapsed_time(end) / repeats, (enqueued - begin) * 1e3 / repeats)


def time_in_rounds(
    subjects: Mapping[str, Subject],
    seconds: float,
    kernel_timer: KernelTimer,
    rng: random.Random,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Timed]:
    """Time each subject in rounds in which every one has its turn, until `seconds` are used up: 5 to 9 rounds.

    A round times the whole calls with CUDA events, then the kernels with the profiler, each in an order from `rng`.
    """
    begin = clock()
    repeats = {name: iterations(visit(subject.call.run, 1).gpu) for name, subject in subjects.items()}
    results = {name: Timed() for name in subjects}
    order = list(subjects)
    for finished in range(1, _MOST_ROUNDS + 1):
        round_begin = clock()
        rng.shuffle(order)
        heat(_PASS_HEAT_SECONDS)
        for name in order:
            one = visit(subjects[name].call.run, repeats[name])
            results[name].calls.append(one.gpu)
            results[name].cpu.append(one.cpu)
        rng.shuffle(order)
        kernel_times = kernel_timer.measure({name: subjects[name] for name in order}, repeats)
        for name, kernel_time in kernel_times.items():
            results[name].kernels.append(kernel_time)
        now = clock()
        if finished >= _FEWEST_ROUNDS and now + (now - round_begin) > begin + seconds:
            break
    return results
