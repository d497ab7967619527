"""Times of a GPU: how they follow from several rounds, and the document that keeps them."""

from __future__ import annotations

import math
import random
from dataclasses import astuple
from typing import Any

import pytest

from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Candidate, Rounds, Times, Work

from .made_up_gpus import EIGHT_HALF, FLASH, WORKS, made_up_gpu


def rounds(count: int = 5, noise: float = 0.01, seed: int = 0) -> dict[Any, list[float]]:
    rng = random.Random(seed)
    return {
        key: [value * math.exp(rng.gauss(0.0, noise)) for _ in range(count)] for key, value in made_up_gpu().items()
    }


def test_causal_calls_have_half_the_pairs() -> None:
    assert [Work(4, 10, 30, 64, is_causal=is_causal).pairs for is_causal in (False, True)] == [1200, 600]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_noise_is_estimated(noise: float) -> None:
    times = Times.of(rounds(7, noise))
    assert times is not None
    assert 0.5 * noise <= times.noise <= 1.5 * noise
    for key, value in made_up_gpu().items():
        assert abs(times.seconds[key] / value - 1.0) <= 4 * noise + 1e-12


def test_one_disturbed_visit_does_not_matter() -> None:
    disturbed = rounds()
    disturbed[EIGHT_HALF, WORKS[4]][2] *= 50.0
    disturbed[FLASH, WORKS[1]][0] *= 50.0
    times = Times.of(disturbed)
    assert times is not None and TunedChoices(times).accumulator("8b") == "fp16"


def with_round(slowness: float, turn: int = 3) -> Rounds:
    return {
        key: [v * (slowness if at == turn else 1.0) for at, v in enumerate(values)] for key, values in rounds().items()
    }


@pytest.mark.parametrize(
    "loaded",
    [
        rounds(5, noise=0.4),
        with_round(2.0),
        with_round(0.5, turn=0),
        rounds(2),
        {},
        {**rounds(), (FLASH, WORKS[0]): [1e-3]},
        {**rounds(), (FLASH, WORKS[0]): [0.0] * 5},
        {**rounds(), (FLASH, WORKS[0]): [math.nan] * 5},
        {**rounds(), (FLASH, WORKS[0]): [math.inf] * 5},
    ],
    ids=range(9),
)
def test_times_of_a_loaded_gpu_are_not_used(loaded: Rounds) -> None:
    assert Times.of(loaded) is None


def test_times_survive_their_document() -> None:
    """Also if a package's outputs are garbage: else the GPU would be measured at each start."""
    times = Times.of(rounds(), {(FLASH, 64): (1e30, None)}, {FLASH: 3e-5}, multiprocessors=132)
    candidates = list(dict.fromkeys(candidate for candidate, _ in made_up_gpu()))
    assert times is not None and Times.read(times.document(), candidates, WORKS) == times


WORK = [16, 1024, 1024, 64, False, False, False]
EIGHT_BITS = ["sm89", "8b", "fp32", True, False, "int8"]
ROW = {"candidate": EIGHT_BITS, "seconds": [1e-4], "host": 2e-5, "errors": {"64": [0.04, None]}}
DOCUMENT: dict[str, Any] = {"noise": 0.01, "multiprocessors": 132, "calls": [WORK], "candidates": [ROW]}


CANDIDATE, CALL = Candidate("sm89", "8b", rotate=True, pv="int8"), Work(16, 1024, 1024, 64)


def read(document: dict[str, Any]) -> Times | None:
    return Times.read(document, [FLASH, CANDIDATE], [CALL, *WORKS])


def test_a_document_is_read() -> None:
    times = read(DOCUMENT)
    assert times == Times({(CANDIDATE, CALL): 1e-4}, 0.01, {(CANDIDATE, 64): (0.04, None)}, {CANDIDATE: 2e-5}, 132)
    assert times is not None and times.document() == DOCUMENT


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": None}, {"noise": -1.0}, {"noise": math.nan}, {"noise": 10**400}, {"noise": "0.01"},
        {"multiprocessors": None}, {"multiprocessors": -1}, {"multiprocessors": math.inf}, {"multiprocessors": "132"},
        {"candidates": [{**ROW, "host": "2e-5"}]}, {"candidates": [{**ROW, "host": math.nan}]},
        {"candidates": [{key: value for key, value in ROW.items() if key != "host"}]},
        {"calls": 1}, {"calls": []}, {"calls": [None]}, {"calls": [WORK, WORK]}, {"calls": [WORK[:-1]]},
        {"calls": [[17, *WORK[1:]]]}, {"calls": [[*WORK[:-1], []]]},
        {"candidates": {}}, {"candidates": []}, {"candidates": [ROW, None]}, {"candidates": [{}]},
        {"candidates": [{**ROW, "seconds": [0]}]}, {"candidates": [{**ROW, "seconds": ["1e-4"]}]},
        {"candidates": [{**ROW, "seconds": [math.inf]}]}, {"candidates": [{**ROW, "seconds": [10**400]}]},
        {"candidates": [{**ROW, "seconds": [5e-324]}]}, {"candidates": [{**ROW, "seconds": [1e308]}]},
        {"candidates": [{**ROW, "seconds": [None]}]}, {"candidates": [{**ROW, "seconds": []}]},
        {"candidates": [{**ROW, "candidate": EIGHT_BITS[:-1]}]},
        {"candidates": [{**ROW, "candidate": ["sm90", *EIGHT_BITS[1:]]}]},
        {"candidates": [{**ROW, "candidate": ["unknown", "peer", "fp32", False, False]}]},
        {"candidates": [{**ROW, "errors": [0.1]}]}, {"candidates": [{**ROW, "errors": {"x": [0.1]}}]},
        {"candidates": [{**ROW, "errors": {"64": [-0.1]}}]}, {"candidates": [{**ROW, "errors": {"64": [10**400]}}]},
        {"candidates": [{**ROW, "errors": {"64": 0.1}}]}, {"candidates": [{**ROW, "errors": {"64": [math.nan]}}]},
    ],
    ids=range(40),
)  # fmt: skip
def test_invalid_documents_are_not_read(changes: dict[str, Any]) -> None:
    assert read({**DOCUMENT, **changes}) is None


@pytest.mark.parametrize("seconds", [1e-9, 1e4])
def test_the_most_extreme_times_that_are_read_give_choices(seconds: float) -> None:
    work = list(astuple(WORKS[3]))
    times = read({**DOCUMENT, "calls": [WORK, work], "candidates": [{**ROW, "seconds": [1e-4, seconds]}]})
    assert times is not None
    choices = TunedChoices(times)
    assert choices.lines()
    assert all(math.isfinite(choices.seconds(*key) or math.nan) for key in times.seconds)
