"""Rounds: the order of the candidates, how often they run, and for how long."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from lab.bench import timing
from lab.bench.candidates import Call, PreparedCandidate
from lab.bench.kernel_times import KernelTimer
from lab.bench.timing import RoundMedian, Timed, Turn, time_in_rounds


class FakeTimer(KernelTimer):
    """Kernels that take half of their call's time."""

    def __init__(self, milliseconds: dict[str, float]) -> None:
        super().__init__()
        self._milliseconds = milliseconds
        self.orders: list[str] = []
        self.turns: dict[str, Turn] = {}

    def measure(self, subjects: Mapping[str, PreparedCandidate], turns: Mapping[str, Turn]) -> dict[str, float]:
        self.turns = dict(turns)
        self.orders.append("".join(subjects))
        return {name: self._milliseconds[name] / 2 for name in subjects}


class Run(NamedTuple):
    """The results, the order of the visits, and the profiler, which records its own order."""

    results: dict[str, Timed]
    visits: list[str]
    timer: FakeTimer


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times calls of given lengths."""

    def timed(milliseconds: dict[str, float], seconds: float) -> Run:
        clock, visits = [0.0], []

        def subject(name: str) -> PreparedCandidate:
            def call() -> torch.Tensor:
                clock[0] += milliseconds[name] / 1e3
                visits.append(name)
                return torch.empty(0)

            return PreparedCandidate(Call(call), Call(call))

        def visit(call: Any, turn: Turn) -> float:
            start_time = clock[0]
            for _ in range(turn.timed):  # the fake clock ignores calls that are not timed
                call()
            return (clock[0] - start_time) * 1e3 / turn.timed

        monkeypatch.setattr(timing, "visit", visit)
        monkeypatch.setattr(timing, "milliseconds_to_enqueue", lambda run, calls: 0.01)
        monkeypatch.setattr(timing, "heat", lambda seconds: None)
        subjects, timer = {name: subject(name) for name in milliseconds}, FakeTimer(milliseconds)
        return Run(time_in_rounds(subjects, seconds, timer.measure, random.Random(1), lambda: clock[0]), visits, timer)

    return timed


def test_candidates_take_turns(run: Any) -> None:
    results, visits, _ = run({"a": 30.0, "b": 60.0}, seconds=0.7)
    rounds = ["".join(visits[start : start + 2]) for start in range(0, len(visits), 2)]
    assert {"".join(sorted(names)) for names in rounds} == {"ab"}
    for values, expected in ((results["a"].calls, 30), (results["b"].calls, 60), (results["b"].kernels, 30)):
        result = RoundMedian.of(values)
        assert result is not None and result.median == pytest.approx(expected)
    # 0.09 s to measure the calls' lengths, then rounds of 0.09 s.
    assert len(results["a"].calls) == len(results["b"].calls) == 6


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 5), (1000.0, 9)])
def test_there_are_five_to_nine_rounds(run: Any, seconds: float, rounds: int) -> None:
    assert len(run({"a": 30.0}, seconds).results["a"].calls) == rounds


@pytest.mark.parametrize(("seconds", "turn"), [(1000.0, (80, 40)), (0.6, (40, 20)), (0.0, (20, 10))])
def test_a_visit_is_as_long_as_the_time_allows(run: Any, seconds: float, turn: tuple[int, int]) -> None:
    assert run({"a": 1.0}, seconds).timer.turns == {"a": turn}


def test_the_spread_is_that_of_the_rounds() -> None:
    assert RoundMedian.of([]) is None
    assert RoundMedian.of([3.0, 1.0, 2.0]) == RoundMedian(2.0, 1.0)
