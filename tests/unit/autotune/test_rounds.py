"""Timing in rounds, with a clock that knows how long each call takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from comfy_sage2.autotune.timings import FEWEST_ROUNDS
from comfy_sage2.timing.rounds import _HEAD_STARTS, MOST_ROUNDS, GpuClock, time_rounds


@dataclass
class FakeClock(GpuClock):
    """Calls take the seconds that they return; time passes only in calls."""

    passed: float = 0.0
    visits: list[tuple[str, int]] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)

    def progress(self, finished: int, parts: int) -> None:
        self.parts.append((finished, parts))

    def visit(self, run: Callable[[], Any], calls: int) -> float:
        name, seconds = run()  # as `runs` makes them
        self.visits.append((name, calls))
        self.passed += seconds * calls
        return float(seconds)

    def now(self) -> float:
        return self.passed


def runs(**seconds: float) -> dict[str, Callable[[], Any]]:
    return {name: (lambda name=name, value=value: (name, value)) for name, value in seconds.items()}  # type: ignore[misc]


def test_every_call_has_its_turn_in_every_round() -> None:
    clock = FakeClock()
    times = time_rounds(runs(short=2e-5, middle=7e-5, long=2e-3), clock, random.Random(0), deadline=10.0)
    assert times == {"short": [2e-5] * MOST_ROUNDS, "middle": [7e-5] * MOST_ROUNDS, "long": [2e-3] * MOST_ROUNDS}
    assert clock.parts == [(finished, 1 + MOST_ROUNDS) for finished in range(1 + MOST_ROUNDS)]
    timed = clock.visits[6:]
    assert {name: {calls for called, calls in timed if called == name} for name in times} == {
        "short": {4}, "middle": {2}, "long": {1}
    }  # fmt: skip
    orders = {tuple(name for name, _ in timed[start : start + 3]) for start in range(0, len(timed), 3)}
    assert len(orders) > 1 and all(sorted(order) == sorted(times) for order in orders)


def test_no_more_rounds_than_the_time_allows() -> None:
    clock = FakeClock()
    times = time_rounds(runs(one=0.02, other=0.04), clock, random.Random(0), deadline=0.43)
    assert len(times["one"]) == len(times["other"]) == 5
    assert clock.passed <= 0.43
    late = FakeClock(passed=0.3)  # earlier time counts
    times = time_rounds(runs(one=0.02, other=0.04), late, random.Random(0), deadline=0.61)
    assert len(times["one"]) == 3
    times = time_rounds(runs(one=5.0), FakeClock(), random.Random(0), deadline=0.3)
    assert len(times["one"]) == FEWEST_ROUNDS


def test_short_rounds_are_made_even_after_the_deadline() -> None:
    late = FakeClock(passed=5.0)
    times = time_rounds(runs(one=0.005, other=0.01), late, random.Random(0), deadline=0.4)
    assert len(times["one"]) == len(times["other"]) == 6  # of 15 ms each
    times = time_rounds(runs(one=0.001), FakeClock(passed=5.0), random.Random(0), deadline=0.4)
    assert len(times["one"]) == MOST_ROUNDS


def test_lack_of_memory_is_raised() -> None:
    def large() -> object:
        raise torch.cuda.OutOfMemoryError("out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        time_rounds({**runs(good=1e-3), "large": large}, FakeClock(), random.Random(0), deadline=0.3)


class FakeGpu:
    """A stream of one GPU. A call takes `enqueueing` ticks on the CPU and `running` on the GPU; a tick is a clock."""

    def __init__(self, enqueueing: int, running: int) -> None:
        self.enqueueing, self.running = enqueueing, running
        self.cpu = self.gpu = 0  # the time on the CPU, and the time when the GPU finishes its queue

    def enqueue(self, ticks: int) -> None:
        self.gpu = max(self.gpu, self.cpu) + ticks

    def call(self) -> None:
        self.cpu += self.enqueueing
        self.enqueue(self.running)

    def event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    """An event of a FakeGpu; a millisecond is 1,000 ticks."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.enqueue(0)
        self.at = self.gpu.gpu

    def query(self) -> bool:
        return self.at <= self.gpu.cpu

    def synchronize(self) -> None:
        self.gpu.cpu = max(self.gpu.cpu, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) / 1e3


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("enqueueing", [1_000, 170_000, 300_000, 1_400_000])
def test_the_overhead_of_python_is_not_timed(monkeypatch: pytest.MonkeyPatch, enqueueing: int, calls: int) -> None:
    gpu = FakeGpu(enqueueing, running=12_000)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.enqueue)
    assert GpuClock().visit(gpu.call, calls) == pytest.approx(12e-3)


def test_a_call_with_a_long_overhead_is_tried_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(10_000_000, running=12_000)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.enqueue)
    GpuClock().visit(gpu.call, 1)
    assert gpu.cpu // 10_000_000 == len(_HEAD_STARTS)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
@pytest.mark.parametrize("visit", range(6))
def test_a_call_that_fails_is_left_out(visit: int, error: type[Exception]) -> None:
    """Another package's attention may fail in any of its visits; the other calls keep all of their rounds."""
    made = 0

    def failing() -> Any:
        nonlocal made
        made += 1
        if made > visit:
            raise error("broken")
        return "failing", 1e-3

    times = time_rounds({**runs(good=1e-3), "failing": failing}, FakeClock(), random.Random(0), deadline=10.0)
    assert times == {"good": [1e-3] * MOST_ROUNDS}
