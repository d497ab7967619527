"""What the guard costs: pairs of a level and off, on a stand-in whose speed drifts and whose cost is known."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.measurements import guard
from lab.measurements.guard import LEVELS, OFF, STEPS, in_turns, share

STEP = 0.05  # seconds


class Drifting:
    """A model that becomes slower for good with every sampling, and varies by `noise` of a step."""

    def __init__(self, rounds: int, cost: dict[str, float], noise: float) -> None:
        self.shape = SimpleNamespace(rounds=rounds, layers=57)
        self.cost, self.noise = cost, noise
        self.asked: list[tuple[str, int]] = []
        self.rng = random.Random(1)

    def sample(self, session: str, steps: int, at_end: bool = True) -> float:
        assert at_end == LEVELS[session].at_end
        self.asked.append((session, steps))
        drift = 1e-5 * len(self.asked)
        return STEP + drift + self.cost.get(session, 0.0) + self.rng.gauss(0.0, self.noise * STEP)


def measured(model: Drifting, name: str) -> list[float]:
    sessions: Any = {level: level for level in LEVELS}
    return in_turns(cast(guard.GuardedModel, model), sessions, name, random.Random(0))


def test_a_level_is_measured_beside_off_alone() -> None:
    name = next(level for level in LEVELS if level != OFF)
    model = Drifting(40, {}, 0.0)
    assert len(measured(model, name)) == 40
    turns = [level for level, steps in model.asked if steps == STEPS]
    pairs = list(zip(turns[::2], turns[1::2], strict=True))
    assert {frozenset(pair) for pair in pairs} == {frozenset((OFF, name))}
    assert len(set(pairs)) == 2, "each is the first at times"


@pytest.mark.parametrize("cost", [0.0, 0.004, 0.01, 0.26])
def test_a_cost_comes_out_within_its_interval(cost: float) -> None:
    """As of Flux on an H200: the attention is 21 of 51 ms, and a sampling varies by half a percent."""
    name, attention = next(level for level in LEVELS if level != OFF), 0.021
    model = Drifting(guard.SHAPES[0].rounds, {name: cost * attention}, 0.005)
    text = share(measured(model, name), attention)
    middle, low, high = (float(number) / 100.0 for number in re.findall(r"-?[\d.]+(?=%)", text))
    assert low <= cost <= high and low <= middle <= high
    assert high - low < 0.01
