"""What follows from times: on made-up GPUs whose times are known exactly, slowed down, noisy or incomplete."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from comfy_sage2.autotune.cost_model import CostModel, TunedChoices
from comfy_sage2.autotune.timings import Candidate, Rounds, Times, Work

from .made_up_gpus import CUDNN, EIGHT, EIGHT_HALF, FLASH, FOUR, FOUR_HALF, GPU, OWN, WORKS, made_up_gpu, seconds


def choices(
    slower: Mapping[Candidate, float] | None = None, without: tuple[Candidate, ...] = (), noise: float = 0.0
) -> TunedChoices:
    return TunedChoices(Times(made_up_gpu(slower, without), noise))


ROOT = Path(__file__).resolve().parents[3]

MODES = ("4b", "8b")  # in the shipped order


@pytest.mark.parametrize(
    "parts", [(6e-6, 3e-14, 5e-10, 9e-10), (0.0, 3e-14, 0.0, 0.0), (1e-5, 3e-14, 0.0, 0.0), (0.0, 3e-14, 5e-10, 5e-10)]
)
def test_models_find_the_parts_of_exact_times(parts: tuple[float, float, float, float]) -> None:
    truth = CostModel(*parts)
    fitted = CostModel.fitted({work: truth.seconds(work) for work in WORKS if work.head_dim == 128})
    for work in (Work(1, 300, 300, 128), Work(24, 75600, 512, 128), Work(40, 75600, 75600, 128, True)):
        assert math.isclose(fitted.seconds(work), truth.seconds(work), rel_tol=1e-6)


def test_models_never_have_negative_parts() -> None:
    rng = random.Random(3)
    for _ in range(200):
        fitted = CostModel.fitted({work: rng.uniform(1e-6, 1e-2) for work in WORKS[: rng.randint(1, 5)]})
        assert min(astuple(fitted)) >= 0.0 and fitted.per_pair > 0.0


def test_an_ordinary_geforce_card() -> None:
    found = choices()
    assert found.accumulator("8b") == found.accumulator("4b") == "fp16"
    assert found.modes_by_speed(MODES) == ("4b", "8b")
    assert found.four_bits_pay() is False  # 560 against 440, less the smoothing of Q
    assert found.fastest_first(["torch-flash", "torch-cudnn"], Work(16, 4096, 4096, 128)) == [
        "torch-cudnn", "torch-flash"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("slower", "accumulator", "mode", "pay"),
    [
        ({EIGHT_HALF: 1.6}, "fp32", "4b", True),
        ({EIGHT_HALF: 3.0, EIGHT: 3.0}, "fp16", "4b", True),
        ({FOUR_HALF: 3.0, FOUR: 3.0}, "fp16", "8b", False),
    ],
)
def test_slow_candidates_lose(slower: dict[Candidate, float], accumulator: str | None, mode: str, pay: bool) -> None:
    found = choices(slower)
    assert (found.accumulator("8b"), found.modes_by_speed(MODES)[0], found.four_bits_pay()) == (accumulator, mode, pay)


def test_ties_decide_nothing() -> None:
    base = made_up_gpu()
    tie = {**base, **{(one, work): base[EIGHT_HALF, work] for one in (EIGHT, FOUR, FOUR_HALF) for work in WORKS}}
    found = TunedChoices(Times(tie, 0.0))
    assert found.modes_by_speed(MODES) == MODES and found.accumulator("8b") is None and found.accumulator("4b") is None
    assert found.four_bits_pay() is False
    assert choices(without=(EIGHT,)).accumulator("8b") is None  # with one of them there is no choice


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.04])
def test_differences_below_the_noise_decide_nothing(noise: float) -> None:
    margin = max(0.02, 2 * noise)
    base = made_up_gpu()
    for ratio, expected in ((1 + 0.5 * margin, None), (1 / (1 + 0.5 * margin), None), (1 + 1.5 * margin, "fp32")):
        times = {**base, **{(EIGHT_HALF, work): ratio * base[EIGHT, work] for work in WORKS}}
        assert TunedChoices(Times(times, noise)).accumulator("8b") == expected
        work = Work(16, 4096, 4096, 128)
        assert TunedChoices(Times(times, noise)).is_faster(EIGHT, EIGHT_HALF, work) == (expected is not None)


@pytest.mark.parametrize("missing", [(FLASH, CUDNN, OWN), (FOUR, FOUR_HALF), (EIGHT, EIGHT_HALF, FOUR, FOUR_HALF)])
def test_what_was_not_timed_decides_nothing(missing: tuple[Candidate, ...]) -> None:
    found = choices(without=missing)
    work = Work(16, 4096, 4096, 128)
    for candidate in missing:
        assert found.seconds(candidate, work) is None
        assert not found.is_faster(candidate, EIGHT, work) and not found.is_faster(EIGHT, candidate, work)
    if FOUR in missing:
        assert found.modes_by_speed(MODES) == MODES and found.four_bits_pay() is None
    if FLASH in missing:
        assert found.fastest_first(["torch-flash", "torch-cudnn"], work) == ["torch-flash", "torch-cudnn"]
    assert found.lines()


def test_only_one_head_dim_of_a_candidate() -> None:
    times = {key: value for key, value in made_up_gpu().items() if key[0] != CUDNN or key[1].head_dim == 64}
    found = TunedChoices(Times(times, 0.0))
    assert found.seconds(CUDNN, Work(16, 4096, 4096, 128)) is None
    assert found.fastest_first(["torch-cudnn", "torch-flash"], Work(16, 4096, 4096, 128))[0] == "torch-flash"


def test_head_dims_between_and_beyond() -> None:
    found = choices()
    work = {head_dim: Work(16, 4096, 4096, head_dim) for head_dim in (40, 64, 96, 128, 160)}
    assert found.seconds(EIGHT, work[40]) == found.seconds(EIGHT, work[64])
    assert found.seconds(EIGHT, work[96]) == found.seconds(EIGHT, work[128])
    assert found.seconds(EIGHT, work[160]) is None


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_crossover_lies_where_the_times_are_equal(head_dim: int) -> None:
    """Quantized calls pay for each token, exact ones for each pair."""
    found = choices()
    length = found.crossover(EIGHT_HALF, head_dim, heads=16)
    assert length is not None and length > 64
    margin = 1.0 + found.margin
    below, above = (Work(16, n, n, head_dim) for n in (length - 32, length))
    assert seconds(GPU, CUDNN, below) * margin < seconds(GPU, EIGHT_HALF, below)
    assert seconds(GPU, CUDNN, above) * margin >= seconds(GPU, EIGHT_HALF, above)


def test_no_crossover_where_exact_attention_always_wins() -> None:
    found = choices({EIGHT: 9.0, EIGHT_HALF: 9.0})
    assert found.crossover(EIGHT_HALF, 128, heads=16) is None
    assert "8b is never the fastest" in found.lines()[-1]
    assert choices({FLASH: 99.0, CUDNN: 99.0, OWN: 99.0}).crossover(EIGHT, 128, heads=16) is not None


def test_the_table_in_words() -> None:
    lines = choices().lines()
    assert len(lines) == 2
    assert lines[1].startswith("head_dim 128, 4096 tokens, TFLOP/s: 8b 261, ")
    for words in ("8b with FP16 accumulators 361", "torch-cudnn 164", "ComfyUI's own 159", "8b is the fastest from "):
        assert words in lines[1]


# As of an H200: TFLOP/s of the products, microseconds of each tile of 128 queries beside them, those of a call's start,
# and bytes for each channel of a query and of a key that a call moves before the attention.
TILES = {EIGHT: (1080, 2.4, 14.0, 3, 8), CUDNN: (690, 1.35, 8.0, 0, 0), FLASH: (360, 1.2, 6.0, 0, 0)}
MULTIPROCESSORS, BYTES_A_SECOND, CACHE = 132, 3.6e12, 50e6


def seconds_in_tiles(candidate: Candidate, work: Work) -> float:
    """A call as GPUs compute it: whole waves of tiles; what fits into the cache is moved twice as fast."""
    rate, beside, start, of_query, of_key = TILES[candidate]
    waves = math.ceil(work.heads * math.ceil(work.q_length / 128) / MULTIPROCESSORS)
    products = math.ceil(work.kv_length / 128) * 4 * 128 * 128 * work.head_dim / (rate * 1e12 / MULTIPROCESSORS)
    channels = work.heads * work.head_dim
    moved = channels * (work.q_length * of_query + work.kv_length * of_key) / BYTES_A_SECOND
    cached = 2 * channels * work.q_length < CACHE
    return start * 1e-6 + waves * (beside * 1e-6 + products) + moved * (0.5 if cached else 1.0)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.01])
@pytest.mark.parametrize(
    "sizes",
    [(40, 8192, 512), (40, 75600, 512), (40, 75600, 257), (12, 32760, 512), (40, 32760, 512), (20, 4608, 1024)],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cross_attention_takes_the_fastest_one(head_dim: int, sizes: tuple[int, int, int], noise: float) -> None:
    """With few keys the quantization of many queries decides, and how fast these come from memory."""
    rng = random.Random(1)
    timed = {
        (one, work): seconds_in_tiles(one, work) * math.exp(rng.gauss(0.0, noise / 2))
        for one in TILES
        for work in WORKS
    }
    found = TunedChoices(Times(timed, noise))
    work = Work(*sizes, head_dim)
    name = found.fastest_first([CUDNN.backend, FLASH.backend], work)[0]
    chosen = Candidate(name) if found.is_faster(Candidate(name), EIGHT, work) else EIGHT
    times = {one: seconds_in_tiles(one, work) for one in TILES}
    assert times[chosen] <= 1.02 * min(times.values()), (chosen, times)


def published() -> dict[Work, dict[Candidate, float]]:
    """Seconds of the calls in docs/results/choices.md, as an H200 took them."""
    found = {}
    for line in (ROOT / "docs" / "results" / "choices.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"\d+( x \d+){4}", cells[0]):
            batch, heads, queries, keys, head_dim = map(int, cells[0].split(" x "))
            times = {EIGHT: float(cells[4]), CUDNN: float(cells[6]), FLASH: float(cells[7])}
            work = Work(batch * heads, queries, keys, head_dim)
            found[work] = {one: microseconds / 1e6 for one, microseconds in times.items()}
    return found


@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_calls_of_an_h200_take_the_fastest_one(noise: float) -> None:
    """Models of five calls like those that are timed choose for the others of the table."""
    table, rng = published(), random.Random(1)
    assert len(table) > 20
    like = [(32, 1024, 1024), (128, 1024, 1024), (32, 2048, 2048), (128, 4096, 4096), (12, 32760, 512)]
    timed = [work for work in table if (work.heads, work.q_length, work.kv_length) in like]
    assert len(timed) == 4 + 5  # no cross-attention at head_dim 64 is in the table
    times = {(one, work): table[work][one] * math.exp(rng.gauss(0.0, noise)) for work in timed for one in table[work]}
    found = TunedChoices(Times(times, noise))
    for work, seconds_of in table.items():
        if work.head_dim == 64 and work.q_length != work.kv_length:
            continue
        name = found.fastest_first([CUDNN.backend, FLASH.backend], work)[0]
        chosen = Candidate(name) if found.is_faster(Candidate(name), EIGHT, work) else EIGHT
        assert seconds_of[chosen] <= 1.035 * min(seconds_of.values()), (work, chosen, seconds_of)


def test_the_long_call_is_the_square_one() -> None:
    """Cross-attention has fewer pairs, and says less about the products."""
    times = made_up_gpu(slower={})
    square, long = Work(32, 4096, 4096, 128), Work(16, 32768, 512, 128)
    assert square.pairs > long.pairs
    for order in (1, -1):
        found = TunedChoices(Times(dict(list(times.items())[::order]), 0.0))
        assert all("4096 tokens" in line for line in found.lines())
        assert found.four_bits_pay() is False


def rounds(count: int = 5, noise: float = 0.01, seed: int = 0) -> dict[Any, list[float]]:
    rng = random.Random(seed)
    return {
        key: [value * math.exp(rng.gauss(0.0, noise)) for _ in range(count)] for key, value in made_up_gpu().items()
    }


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


ROW = ["sm89", "8b", "fp32", 16, 1024, 1024, 64, 1e-4]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"noise": 0.01},
        {"noise": 0.01, "seconds": []},
        {"noise": 0.01, "seconds": {}},
        {"noise": -1.0, "seconds": [ROW]},
        {"noise": True, "seconds": [ROW]},
        {"noise": math.nan, "seconds": [ROW]},
        {"noise": 0.01, "seconds": [ROW[:-1]]},
        {"noise": 0.01, "seconds": [[*ROW, 1]]},
        {"noise": 0.01, "seconds": [ROW, None]},
        {"noise": 0.01, "seconds": [[*ROW[:-1], 0]]},
        {"noise": 0.01, "seconds": [[*ROW[:-1], "1e-4"]]},
        {"noise": 0.01, "seconds": [[*ROW[:-1], math.inf]]},
        {"noise": 0.01, "seconds": [["sm89", "2b", *ROW[2:]]]},
        {"noise": 0.01, "seconds": [["sm89", [], *ROW[2:]]]},
        {"noise": 0.01, "seconds": [[1, *ROW[1:]]]},
        {"noise": 0.01, "seconds": [[*ROW[:3], 16.5, *ROW[4:]]]},
        {"noise": 0.01, "seconds": [[*ROW[:3], True, *ROW[4:]]]},
        {"noise": 0.01, "seconds": [[*ROW[:3], -1, *ROW[4:]]]},
        {"noise": 10**400, "seconds": [ROW]},
        {"noise": 0.01, "seconds": [[*ROW[:-1], 10**400]]},
        {"noise": 0.01, "seconds": [[*ROW[:-1], 5e-324]]},
        {"noise": 0.01, "seconds": [[*ROW[:-1], 1e308]]},
        {"noise": 0.01, "seconds": [[*ROW[:3], 10**400, *ROW[4:]]]},
        {"noise": 0.01, "seconds": [[*ROW[:4], 10**200, *ROW[5:]]]},
        {"noise": 0.01, "seconds": [[*ROW[:3], 2**63, *ROW[4:]]]},
        {"noise": 0.01, "seconds": [ROW] * 2001},
    ],
    ids=range(27),
)
def test_documents_of_others_are_not_read(document: dict[str, Any]) -> None:
    assert Times.read({"noise": 0.01, "seconds": [ROW]}) is not None
    assert Times.read(document) is None


@pytest.mark.parametrize("size", [1, 1 << 31])
@pytest.mark.parametrize("seconds", [1e-9, 1e4])
def test_the_most_extreme_documents_that_are_read_give_choices(size: int, seconds: float) -> None:
    """Whatever one size of them is, beside ordinary rows."""
    for place in range(3, 7):
        row = [*ROW[:-1], seconds]
        row[place] = size
        read = Times.read({"noise": 0.01, "seconds": [ROW, row]})
        assert read is not None
        chosen = TunedChoices(read)
        assert chosen.lines()
        assert all(math.isfinite(chosen.seconds(*key) or math.nan) for key in read.seconds)
