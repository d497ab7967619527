"""Times calls on the GPU. Candidates take turns, in a new random order in every round.

What ran before affects a GPU at its power limit for some 100 ms. So a candidate first runs untimed, and the predecessor
that still affects it differs from round to round.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch

from .candidates import PreparedCandidate

_TIMED = 0.04  # the most seconds that a visit times; when time is short, down to a quarter of it
_SETTLING = 2  # a candidate first runs untimed for this many times as long
_MOST_CALLS = 200
# The most calls where more are no use: reading a profiler's record takes longer than a short call, and a full queue
# stops the CPU.
_FEW_CALLS = 50
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 9
_PASS_HEAT_SECONDS = 0.1  # between two passes the GPU idles, while the profiler starts or is read
_HEAT_SIZE = 8192  # matrix products of this size take milliseconds, and as much power as the GPU can take


class Turn(NamedTuple):
    """How many calls a visit makes: first untimed, then timed."""

    settling: int
    timed: int

    @classmethod
    def of(cls, milliseconds: float, seconds: float = _TIMED) -> Turn:
        """For calls of this length: time as many as take `seconds`, at least one and at most 200."""

        def calls(seconds: float, most: int) -> int:
            return min(max(math.ceil(seconds * 1e3 / max(milliseconds, 1e-3)), 1), most)

        return cls(calls(_SETTLING * seconds, _SETTLING * _MOST_CALLS), calls(seconds, _MOST_CALLS))


@dataclass
class Timed:
    """The results of one candidate's rounds, in milliseconds per call; cpu: the CPU's time to enqueue a call."""

    cpu: float
    calls: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RoundMedian:
    """Median milliseconds over rounds; spread: (most - least) / median."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: list[float]) -> RoundMedian | None:
        """None when there is no value."""
        if not values:
            return None
        middle = median(values)
        return cls(middle, (max(values) - min(values)) / middle)


# `kernel_times.KernelTimer.measure`.
MeasureKernels = Callable[[Mapping[str, PreparedCandidate], Mapping[str, Turn]], dict[str, float]]


def heat(seconds: float) -> None:
    """Multiply matrices on the current device, to bring it to the temperature and the clocks of sustained load."""
    matrix = torch.randn(_HEAT_SIZE, _HEAT_SIZE, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(4):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()


def visit(run: Callable[[], torch.Tensor], turn: Turn) -> float:
    """Mean milliseconds of a call on the GPU, by CUDA events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(turn.settling):
        run()
    start.record()
    for _ in range(turn.timed):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / turn.timed


def milliseconds_to_enqueue(run: Callable[[], torch.Tensor], calls: int) -> float:
    """The CPU's time for a call: the mean of `calls` in a row."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return (enqueued - begin) * 1e3 / calls


def time_in_rounds(
    subjects: Mapping[str, PreparedCandidate],
    seconds: float,
    measure_kernels: MeasureKernels | None,
    rng: random.Random,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Timed]:
    """Time every subject in each of at least 5 rounds, until `seconds` are used up.

    A round times the whole calls with CUDA events, then the kernels with the profiler, each in an order from `rng`.
    measure_kernels: None leaves the profiler's part out.
    """
    begin = clock()
    lengths = {name: visit(subject.call.run, Turn(1, 1)) for name, subject in subjects.items()}
    visits = _FEWEST_ROUNDS * len(subjects) * (1 if measure_kernels is None else 2)
    timed = min(max(seconds / max(visits * (1 + _SETTLING), 1), _TIMED / 4), _TIMED)
    turns = {name: Turn.of(length, timed) for name, length in lengths.items()}
    few = {name: Turn(turn.settling, min(turn.timed, _FEW_CALLS)) for name, turn in turns.items()}
    results = {
        name: Timed(milliseconds_to_enqueue(subject.call.run, few[name].timed)) for name, subject in subjects.items()
    }
    order = list(subjects)
    for finished in range(1, _MOST_ROUNDS + 1):
        round_begin = clock()
        rng.shuffle(order)
        heat(_PASS_HEAT_SECONDS)
        for name in order:
            results[name].calls.append(visit(subjects[name].call.run, turns[name]))
        if measure_kernels is not None:
            rng.shuffle(order)
            kernel_times = measure_kernels({name: subjects[name] for name in order}, few)
            for name, kernel_time in kernel_times.items():
                results[name].kernels.append(kernel_time)
        round_end = clock()
        if finished >= _FEWEST_ROUNDS and round_end + (round_end - round_begin) > begin + seconds:
            break
    return results
