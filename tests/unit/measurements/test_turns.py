"""Threads take turns: they run one at a time and equally often, and none waits for one that has ended."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from lab.families.turns import Turns


def test_threads_run_one_at_a_time_and_equally_often() -> None:
    steps = {"a": 5, "b": 5, "c": 2}
    turns, log, running = Turns(steps, random.Random(3)), list[str](), list[str]()

    def run(name: str) -> None:
        turns.wait(name)
        for step in range(steps[name]):
            running.append(name)
            log.append(name)
            assert running == [name]
            running.remove(name)
            if step + 1 < steps[name]:
                turns.give()
                turns.wait(name)
        turns.leave(name)

    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(run, name) for name in steps]
        turns.give()
        for thread in threads:
            thread.result(timeout=10)
    cycles = [log[0:3], log[3:6], log[6:8], log[8:10], log[10:12]]
    assert [sorted(cycle) for cycle in cycles] == [["a", "b", "c"]] * 2 + [["a", "b"]] * 3
    assert len({tuple(cycle) for cycle in cycles}) > 2  # each cycle has a new random order


def test_other_threads_continue_if_one_fails() -> None:
    turns, log = Turns(["a", "b"], random.Random(0)), list[str]()

    def run(name: str) -> None:
        turns.wait(name)
        try:
            if name == "a":
                raise ValueError(name)
            log.append(name)
        finally:
            turns.leave(name)

    with ThreadPoolExecutor(2) as pool:
        fails, other = (pool.submit(run, name) for name in ("a", "b"))
        turns.give()
        other.result(timeout=10)
        with pytest.raises(ValueError, match="a"):
            fails.result(timeout=10)
    assert log == ["b"]
