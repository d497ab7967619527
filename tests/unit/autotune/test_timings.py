"""Times of a GPU: what counts of several rounds, and the document in which they are kept."""

from __future__ import annotations

import math
import random
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
        key: [v * (slowness if at == turn else 1.0) for at, v in enumerate(found)] for key, found in rounds().items()
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
def test_times_of_a_loaded_card_are_not_used(loaded: Rounds) -> None:
    assert Times.of(loaded) is None


def test_times_survive_their_document() -> None:
    times = Times.of(rounds())
    assert times is not None and Times.read(times.document()) == times


WORK = [16, 1024, 1024, 64, False, False, False]
EIGHT_BITS = ["sm89", "8b", "fp32", True, False]
ROW = {"candidate": EIGHT_BITS, "seconds": [1e-4], "errors": {"64": [0.04, None]}}
DOCUMENT: dict[str, Any] = {"noise": 0.01, "calls": [WORK], "candidates": [ROW]}


def test_a_document_is_read() -> None:
    found = Times.read(DOCUMENT)
    one, work = Candidate("sm89", "8b", rotate=True), Work(16, 1024, 1024, 64)
    assert found == Times({(one, work): 1e-4}, 0.01, {(one, 64): (0.04, None)})
    assert found is not None and found.document() == DOCUMENT


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": None}, {"noise": -1.0}, {"noise": True}, {"noise": math.nan}, {"noise": 10**400},
        {"calls": {}}, {"calls": []}, {"calls": [None]}, {"calls": [WORK, WORK]}, {"calls": [WORK[:-1]]},
        {"calls": [[16.5, *WORK[1:]]]}, {"calls": [[True, *WORK[1:]]]}, {"calls": [[-1, *WORK[1:]]]},
        {"calls": [[2**63, *WORK[1:]]]}, {"calls": [[10**400, *WORK[1:]]]}, {"calls": [[*WORK[:-1], 1]]},
        {"candidates": {}}, {"candidates": []}, {"candidates": [ROW, None]}, {"candidates": [{}]},
        {"candidates": [{**ROW, "more": 1}]},
        {"candidates": [{**ROW, "seconds": [0]}]}, {"candidates": [{**ROW, "seconds": ["1e-4"]}]},
        {"candidates": [{**ROW, "seconds": [math.inf]}]}, {"candidates": [{**ROW, "seconds": [10**400]}]},
        {"candidates": [{**ROW, "seconds": [5e-324]}]}, {"candidates": [{**ROW, "seconds": [1e308]}]},
        {"candidates": [{**ROW, "errors": {"64": [10**400]}}]}, {"candidates": [ROW] * 20001},
        {"candidates": [{**ROW, "seconds": [None]}]}, {"candidates": [{**ROW, "seconds": []}]},
        {"candidates": [{**ROW, "candidate": EIGHT_BITS[:-1]}]},
        {"candidates": [{**ROW, "candidate": [1, *EIGHT_BITS[1:]]}]},
        {"candidates": [{**ROW, "candidate": ["sm89", "2b", *EIGHT_BITS[2:]]}]},
        {"candidates": [{**ROW, "candidate": ["sm89", [], *EIGHT_BITS[2:]]}]},
        {"candidates": [{**ROW, "candidate": ["sm89", "8b", "auto", True, False]}]},
        {"candidates": [{**ROW, "candidate": ["sm89", "8b", "fp32", 1, False]}]},
        {"candidates": [{**ROW, "candidate": ["sm89", "exact", "fp32", True, False]}]},
        {"candidates": [{**ROW, "candidate": ["kitchen", "peer", "fp16", False, False]}]},
        {"candidates": [{**ROW, "errors": [0.1]}]}, {"candidates": [{**ROW, "errors": {"x": [0.1]}}]},
        {"candidates": [{**ROW, "errors": {"9" * 99: [0.1]}}]}, {"candidates": [{**ROW, "errors": {"64": [-0.1]}}]},
        {"candidates": [{**ROW, "errors": {"64": 0.1}}]}, {"candidates": [{**ROW, "errors": {"64": [math.nan]}}]},
    ],
    ids=range(45),
)  # fmt: skip
def test_documents_of_others_are_not_read(changes: dict[str, Any]) -> None:
    assert Times.read({**DOCUMENT, **changes}) is None


@pytest.mark.parametrize("size", [1, (1 << 31) - 1])
@pytest.mark.parametrize("seconds", [1e-9, 1e4])
def test_the_most_extreme_documents_that_are_read_give_choices(size: int, seconds: float) -> None:
    """Whatever one size of them is, beside an ordinary call."""
    for place in range(4):
        work = list(WORK)
        work[place] = size
        read = Times.read({**DOCUMENT, "calls": [WORK, work], "candidates": [{**ROW, "seconds": [1e-4, seconds]}]})
        assert read is not None
        chosen = TunedChoices(read)
        assert chosen.lines()
        assert all(math.isfinite(chosen.seconds(*key) or math.nan) for key in read.seconds)


def test_a_document_that_would_take_minutes_to_choose_from_is_not_read() -> None:
    """Each head_dim of each candidate gets a model, and the choices look at the times of all for each."""
    works = [[*WORK[:3], head_dim, *WORK[4:]] for head_dim in range(1, 10)]
    rows = [{**ROW, "candidate": [f"a{number}", *EIGHT_BITS[1:]]} for number in range(61)]
    for calls, candidates in ((works, rows[:1]), (works[:1], rows)):
        many = [{**row, "seconds": [1e-4] * len(calls)} for row in candidates]
        assert Times.read({**DOCUMENT, "calls": calls, "candidates": many}) is None
        fewer = [{**row, "seconds": [1e-4] * len(calls[:8])} for row in many[:60]]
        assert Times.read({**DOCUMENT, "calls": calls[:8], "candidates": fewer}) is not None


def test_a_document_of_an_earlier_format_is_not_read() -> None:
    row = ["sm89", "8b", "fp32", 16, 1024, 1024, 64, 1e-4]
    assert Times.read({"noise": 0.01, "seconds": [row]}) is None
