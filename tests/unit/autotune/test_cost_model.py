"""What the cost model derives from the times of made-up GPUs: known exactly, slowed down, noisy or incomplete."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comfy_sage2.autotune.cost_model import CostModel, TunedChoices
from comfy_sage2.autotune.timings import PEER, Candidate, Times, Work

from .made_up_gpus import (
    CUDNN,
    EIGHT,
    EIGHT_HALF,
    FLASH,
    FOUR,
    FOUR_HALF,
    OWN,
    WORKS,
    h200_times,
    made_up_gpu,
)


def choices(
    slower: Mapping[Candidate, float] | None = None, without: tuple[Candidate, ...] = (), noise: float = 0.0
) -> TunedChoices:
    return TunedChoices(Times(made_up_gpu(slower, without), noise))


@pytest.mark.parametrize(
    "parts", [(6e-6, 3e-14, 5e-10, 9e-10), (0.0, 3e-14, 0.0, 0.0), (1e-5, 3e-14, 0.0, 0.0), (0.0, 3e-14, 5e-10, 5e-10)]
)
def test_models_find_the_parts_of_exact_times(parts: tuple[float, float, float, float]) -> None:
    truth = CostModel(parts)
    fitted = CostModel.fitted({work: truth.seconds(work) for work in WORKS if work.head_dim == 128})
    for work in (Work(1, 300, 300, 128), Work(24, 75600, 512, 128), Work(40, 75600, 75600, 128, True)):
        assert math.isclose(fitted.seconds(work), truth.seconds(work), rel_tol=1e-6)


def test_models_never_have_negative_parts() -> None:
    rng = random.Random(3)
    for _ in range(200):
        fitted = CostModel.fitted({work: rng.uniform(1e-6, 1e-2) for work in WORKS[: rng.randint(1, 5)]})
        assert min(fitted.parts) >= 0.0 and fitted.parts[1] > 0.0


def test_ties_decide_nothing() -> None:
    base = made_up_gpu()
    tie = {
        **base,
        **{(candidate, work): base[EIGHT_HALF, work] for candidate in (EIGHT, FOUR, FOUR_HALF) for work in WORKS},
    }
    tuned = TunedChoices(Times(tie, 0.0))
    assert tuned.accumulator("8b") is None and tuned.accumulator("4b") is None
    assert choices(without=(EIGHT,)).accumulator("8b") is None  # with a single one there is no choice


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.04])
def test_differences_below_the_noise_decide_nothing(noise: float) -> None:
    margin = max(0.02, 2 * noise)
    base = made_up_gpu()
    for ratio, expected in ((1 + 0.9 * margin, None), (1 / (1 + 0.9 * margin), None), (1 + 1.1 * margin, "fp32")):
        times = {**base, **{(EIGHT_HALF, work): ratio * base[EIGHT, work] for work in WORKS}}
        assert TunedChoices(Times(times, noise)).accumulator("8b") == expected
        work = Work(16, 4096, 4096, 128)
        assert TunedChoices(Times(times, noise)).is_faster(EIGHT, EIGHT_HALF, work) == (expected is not None)


@pytest.mark.parametrize("missing", [(FLASH, CUDNN, OWN), (FOUR, FOUR_HALF), (EIGHT, EIGHT_HALF, FOUR, FOUR_HALF)])
def test_missing_times_decide_nothing(missing: tuple[Candidate, ...]) -> None:
    tuned = choices(without=missing)
    work = Work(16, 4096, 4096, 128)
    for candidate in missing:
        assert tuned.seconds(candidate, work) is None
        assert not tuned.is_faster(candidate, EIGHT, work) and not tuned.is_faster(EIGHT, candidate, work)
    if FOUR in missing:
        assert tuned.accumulator("4b") is None
    if FLASH in missing:
        assert tuned.fastest_first(["torch-flash", "torch-cudnn"], work) == ["torch-flash", "torch-cudnn"]
    assert tuned.lines()


def test_the_lines_of_the_report() -> None:
    lines = choices().lines()
    assert len(lines) == 2
    assert lines[1].startswith("head_dim 128, 4096 tokens, TFLOP/s: 8b 261, ")
    for words in (
        "8b with FP16 accumulators 361",
        "torch-cudnn 164",
        "ComfyUI's own 159",
        "the fastest is 4b with FP16 accumulators",
    ):
        assert words in lines[1]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "faster", "is_lost"),
    [
        ({}, EIGHT, False),
        ({EIGHT: 7e-5}, EIGHT, False),  # the other's host time is unknown
        ({EIGHT: 2e-5, CUDNN: 5e-5}, EIGHT, False),
        ({EIGHT: 5e-5, CUDNN: 2e-5}, EIGHT, False),  # costs 30 us of the host and saves 40 us of the GPU
        ({EIGHT: 7e-5, CUDNN: 2e-5}, EIGHT, True),
        ({EIGHT: 3e-4, CUDNN: 2e-5}, CUDNN, True),
        ({EIGHT: 3e-4, CUDNN: 3e-4}, None, False),  # the host sets the pace of both
    ],
)
def test_host_times_count(host: dict[Candidate, float], faster: Candidate | None, is_lost: bool) -> None:
    work = WORKS[3]
    tuned = TunedChoices(Times({(EIGHT, work): 1.6e-4, (CUDNN, work): 2e-4}, 0.0, host=host))
    assert tuned.is_faster(EIGHT, CUDNN, work) == (faster == EIGHT)
    assert tuned.is_faster(CUDNN, EIGHT, work) == (faster == CUDNN)
    assert tuned.is_lost_on_the_host(EIGHT, CUDNN, work) == is_lost


EIGHT_ROTATED = Candidate("sm89", "8b", rotate=True, pv="fp8")
COLUMNS = {
    "ComfyUI's own": OWN, "8b": Candidate("sm90", "8b", pv="fp8"),
    "8b with rotation": Candidate("sm90", "8b", rotate=True, pv="fp8"),
    "precise": Candidate("sm90", "precise", pv="fp16"), "torch-cudnn": CUDNN, "torch-flash": FLASH,
}  # fmt: skip


def published() -> dict[Work, dict[Candidate, float]]:
    """Seconds of calls of up to 4,608 tokens on an H200, measured by `lab choices` on 2026-11-29 in microseconds."""
    calls: dict[Work, dict[Candidate, float]] = {}
    with (Path(__file__).parent / "h200_calls.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            heads, queries, keys, head_dim = (int(row[name]) for name in ("heads", "queries", "keys", "head_dim"))
            work = Work(heads, queries, keys, head_dim, False, row["tokens together"] == "1", row["mask"] == "1")
            calls[work] = {way: float(row[name]) / 1e6 for name, way in COLUMNS.items() if row.get(name)}
    return calls


@pytest.mark.parametrize("mine", [COLUMNS["8b"], COLUMNS["8b with rotation"], COLUMNS["precise"]])
def test_short_calls_in_a_row_take_the_fastest_candidate_on_an_h200(mine: Candidate) -> None:
    """A call takes the longer of GPU and host time; ComfyUI's own attention costs the host four times a kernel's."""
    table, times = published(), h200_times()
    assert len(table) == 50 and {mine, CUDNN, FLASH, OWN} <= times.host.keys()
    tuned, blind = TunedChoices(times), TunedChoices(replace(times, multiprocessors=0))
    wrong, errors = [], {True: 0.0, False: 0.0}
    for work, seconds_of in table.items():
        in_a_row = {way: max(seconds_of[way], times.host[way]) for way in (mine, CUDNN, FLASH, OWN)}
        exact = Candidate(tuned.fastest_first([CUDNN.backend, FLASH.backend], work)[0])
        chosen = exact if tuned.is_faster(exact, mine, work) else mine
        chosen = OWN if tuned.is_faster(OWN, chosen, work) else chosen
        if in_a_row[chosen] > 1.03 * min(in_a_row.values()):
            wrong.append((work, chosen))
        for knows_tiles, choices_of_times in ((True, tuned), (False, blind)):
            predicted = choices_of_times.seconds(mine, work)
            assert predicted is not None
            errors[knows_tiles] += abs(predicted / seconds_of[mine] - 1.0) / len(table)
    assert len(wrong) <= 3, wrong
    assert errors[True] < 0.05 < errors[False]


@pytest.mark.parametrize("order", [1, -1])
def test_the_report_is_about_the_ordinary_square_call(order: int) -> None:
    """Cross-attention has fewer pairs; calls with a mask have as many but other times."""
    times = with_kind(made_up_gpu(), 3.0, hides_keys=True)
    choices = TunedChoices(Times(dict(list(times.items())[::order]), 0.0))
    assert all("4096 tokens" in line for line in choices.lines())
    assert "8b with FP16 accumulators 361" in choices.lines()[1]


def with_kind(times: Mapping[tuple[Candidate, Work], float], factor: float, **kind: bool) -> dict[Any, float]:
    """`times`, and the times of the same calls of another kind, which take `factor` times as long."""
    return {
        **times,
        **{(candidate, replace(work, **kind)): factor * value for (candidate, work), value in times.items()},
    }


def test_calls_of_each_kind_have_their_own_times() -> None:
    base = made_up_gpu()
    work = WORKS[3]
    heads_first, masked = replace(work, heads_first=True), replace(work, hides_keys=True)
    tuned = TunedChoices(Times(base, 0.0))
    usual = tuned.seconds(CUDNN, work)
    assert tuned.seconds(CUDNN, heads_first) == usual  # `work` stands for it
    assert tuned.seconds(CUDNN, masked) is None  # the cost of a mask is unknown
    both = {**with_kind(base, 3.0, heads_first=True), **with_kind(base, 5.0, hides_keys=True)}
    tuned = TunedChoices(Times(both, 0.0))
    assert usual is not None and tuned.seconds(CUDNN, work) == pytest.approx(usual)
    assert tuned.seconds(CUDNN, heads_first) == pytest.approx(3 * usual)
    assert tuned.seconds(CUDNN, masked) == pytest.approx(5 * usual)
    assert tuned.seconds(CUDNN, replace(masked, heads_first=True)) == pytest.approx(5 * usual)


def test_rotation_has_its_own_times() -> None:
    base = made_up_gpu()
    rotated = {(EIGHT_ROTATED, work): 1.3 * base[EIGHT, work] for work in WORKS}
    tuned = TunedChoices(Times({**base, **rotated}, 0.0))
    work = WORKS[3]
    assert tuned.is_faster(EIGHT, EIGHT_ROTATED, work)
    smoothed = replace(EIGHT_ROTATED, smooth_v=True)
    assert tuned.seconds(smoothed, work) == tuned.seconds(EIGHT_ROTATED, work)  # not timed: EIGHT_ROTATED stands for it
    assert "8b with rotation " in tuned.lines()[1]


KITCHEN = Candidate("comfy-kitchen", PEER)


@pytest.mark.parametrize(
    ("mine", "theirs", "allowed"),
    [
        ((0.01, 0.02), (0.04, 0.02), True),
        ((0.01, 0.0209), (0.04, 0.02), True),  # within the variation of errors
        ((0.01, 0.0211), (0.04, 0.02), False),  # worse on one kind of inputs
        ((0.01, None), (0.04, 0.02), True),  # such calls never reach the package
        ((0.01, 0.02), (0.04, None), False),
        ((None, None), (0.04, 0.02), False),
        ((0.01,), (0.04, 0.02), False),
        ((), (), False),
    ],
)
def test_errors_are_compared_on_each_kind_of_inputs(
    mine: tuple[float | None, ...], theirs: tuple[float | None, ...], allowed: bool
) -> None:
    times = {**made_up_gpu(), **{(KITCHEN, work): 1e-5 for work in WORKS}}
    tuned = TunedChoices(Times(times, 0.0, {(KITCHEN, 128): mine, (EIGHT, 128): theirs}))
    assert tuned.is_no_less_exact(KITCHEN, EIGHT, 96) == tuned.is_no_less_exact(KITCHEN, EIGHT, 128) == allowed
    assert not tuned.is_no_less_exact(KITCHEN, EIGHT, 64)  # no errors are known for 64
    assert tuned.peers == ([KITCHEN] if mine and mine[0] is not None else [])


def test_a_package_whose_outputs_are_unlike_attention_serves_no_call() -> None:
    times = {**made_up_gpu(), **{(KITCHEN, work): 1e-5 for work in WORKS}}
    for errors, peers in (((0.016,), [KITCHEN]), ((1.4,), []), ((), [])):  # NaN errors are not kept
        assert TunedChoices(Times(times, 0.0, {(KITCHEN, 64): (0.016,), (KITCHEN, 128): errors})).peers == (
            peers if errors else [KITCHEN]
        )
    assert TunedChoices(Times(times, 0.0, {})).peers == []


def test_a_size_without_times_of_a_mode_has_no_line() -> None:
    """For example from a file that was cut short by hand."""
    smooth = replace(EIGHT, smooth_v=True)
    assert not TunedChoices(Times({(smooth, WORKS[0]): 1e-3}, 0.0)).lines()


INT8, FP8, FP8_HALF, MXFP8 = (
    Candidate("sm120", "8b", sums, pv=pv)
    for pv, sums in (("int8", "fp32"), ("fp8", "fp32"), ("fp8", "fp16"), ("mxfp8", "fp32"))
)
CLOSE, FAR = (0.015, 0.03), (0.038, 0.035)  # errors of two kinds of inputs


@pytest.mark.parametrize(
    ("factors", "errors", "expected"),
    [
        ({INT8: 1.02, FP8: 2.0, FP8_HALF: 1.0}, {INT8: CLOSE, FP8: FAR, FP8_HALF: FAR}, "int8"),
        ({INT8: 1.05, FP8: 2.0, FP8_HALF: 1.0}, {INT8: CLOSE, FP8: FAR, FP8_HALF: FAR}, "fp8"),
        ({INT8: 1.0, FP8: 1.0, MXFP8: 1.02}, {INT8: FAR, FP8: FAR, MXFP8: CLOSE}, "mxfp8"),
        ({INT8: 1.0, FP8: 0.99}, {INT8: CLOSE, FP8: (0.014, 0.4)}, "int8"),  # close with some inputs only
        ({INT8: 1.0}, {INT8: CLOSE}, None),
        ({INT8: 1.0, FP8: 0.5}, {INT8: CLOSE}, None),  # FP8's errors are unknown
        ({}, {}, None),
    ],
    ids=range(7),
)
def test_the_most_exact_format_that_costs_little_is_chosen(
    factors: dict[Candidate, float], errors: dict[Candidate, tuple[float, float]], expected: str | None
) -> None:
    times = {(candidate, work): factor * 1e-9 * work.pairs for candidate, factor in factors.items() for work in WORKS}
    tuned = TunedChoices(Times(times, 0.0, {(of, head_dim): e for of, e in errors.items() for head_dim in (64, 128)}))
    assert tuned.pv_format("8b") == expected and tuned.pv_format("4b") is None
