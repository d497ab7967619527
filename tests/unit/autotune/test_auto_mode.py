"""Mode "auto": "precise" if it costs at most 15 % more than "8b" by the times of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import comfy_sage2
from comfy_sage2.autotune import store
from comfy_sage2.autotune.auto_mode import auto_mode
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Candidate, Times, Work
from comfy_sage2.options import AttentionOptions

from .made_up_gpus import EIGHT, FOUR, WORKS, h200_times, made_up_gpu

GPU = torch.device("cuda", 0)
AUTO = AttentionOptions("auto", pv_accumulator="auto", rotate="off")
PRECISE = replace(EIGHT, mode="precise")
LONG = {head_dim: Work(32, 4096, 4096, head_dim) for head_dim in (64, 128)}


@pytest.fixture(autouse=True)
def fresh_store() -> Iterator[None]:
    store.forget()
    yield
    store.forget()


def keep(times: dict[Any, float], errors: dict[Any, Any] | None = None) -> None:
    store.keep(0, TunedChoices(Times(times, 0.0, errors or {})))


def with_precise(ratio: float) -> dict[Any, float]:
    """A GPU on which precise takes `ratio` of the time of 8b with its faster accumulators, in every call."""
    times = made_up_gpu()
    fastest = {work: min(times[candidate, work] for candidate in eights()) for work in WORKS}
    return {**times, **{(PRECISE, work): ratio * fastest[work] for work in WORKS}}


def mode(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, **options: Any) -> str:
    return auto_mode(replace(AUTO, **options), GPU, dtype, head_dim).mode


def reason(head_dim: int = 128) -> str:
    return auto_mode(AUTO, GPU, torch.bfloat16, head_dim).reason


@pytest.mark.parametrize(("ratio", "expected"), [(0.9, "precise"), (1.149, "precise"), (1.151, "8b"), (2.0, "8b")])
def test_the_times_decide(ratio: float, expected: str) -> None:
    keep(with_precise(ratio))
    assert mode(64) == mode(128) == mode(40) == expected


def test_mode_4b_is_never_chosen() -> None:
    times = with_precise(1.5)
    keep({key: value * (0.1 if key[0].mode == "4b" else 1.0) for key, value in times.items()})
    assert mode() == "8b"


def test_each_head_dim_decides_for_itself() -> None:
    times = with_precise(1.5)
    for work in WORKS:
        if work.head_dim == 64:
            times[PRECISE, work] /= 1.5
    keep(times)
    assert (mode(40), mode(64), mode(72), mode(128)) == ("precise", "precise", "8b", "8b")


def test_long_calls_decide() -> None:
    times = {key: value * (3.0 if key[0] == PRECISE else 1.0) for key, value in with_precise(1.0).items()}
    for head_dim in (64, 128):
        times[PRECISE, LONG[head_dim]] /= 3.0
    keep(times)
    assert mode() == "precise"


def test_rotation_and_accumulators_are_those_of_the_call() -> None:
    times = with_precise(1.0)
    for work in WORKS:
        times[replace(PRECISE, rotate=True), work] = 2.0
        times[replace(EIGHT, rotate=True), work] = 1.0
    keep(times)
    assert mode(rotate="on") == mode(rotate="auto") == "8b" and mode() == "precise"
    keep({key: value for key, value in times.items() if key[0] != EIGHT or key[1] != LONG[128]})
    assert mode(pv_accumulator="fp32") == "8b"  # it was timed with the other accumulators only
    assert mode(pv_accumulator="auto") == "precise"


def test_without_times_it_is_8b() -> None:
    assert mode() == "8b" and reason() == "8b, as nothing was measured on this device"
    keep(with_precise(1.0))
    assert auto_mode(AUTO, torch.device("cpu"), torch.bfloat16, 128).mode == "8b"
    assert mode(160) == mode(dtype=torch.float32) == "8b" and reason(160) == "8b, as such calls are not timed"
    keep({key: value for key, value in made_up_gpu().items() if key[0] != FOUR})
    assert mode() == "8b" and "only one of 8b and precise" in reason()


def test_the_text_of_the_reason() -> None:
    keep(with_precise(1.06), {(PRECISE, 128): (0.01,), **{(candidate, 128): (0.036,) for candidate in eights()}})
    assert reason() == "precise, 6% slower than 8b here and 3.6 times as exact on Gaussian inputs"
    assert reason(64) == "precise, 6% slower than 8b here"  # no errors are known for 64
    keep(with_precise(0.9))
    assert reason() == "precise, 10% faster than 8b here"
    keep(with_precise(1.5))
    assert reason() == "8b, as precise is 50% slower here"


def eights() -> set[Candidate]:
    return {candidate for candidate, _ in made_up_gpu() if candidate.mode == "8b"}


@pytest.mark.parametrize("rotate", ["auto", "off"])
def test_an_h200_takes_precise(rotate: str) -> None:
    store.keep(0, TunedChoices(h200_times()))
    assert mode(64, rotate=rotate) == mode(128, rotate=rotate) == "precise"
    chosen = auto_mode(replace(AUTO, rotate="auto"), GPU, torch.bfloat16, 128)
    assert chosen.reason == "precise, 8% slower than 8b here and 3.5 times as exact on Gaussian inputs"


def test_attention_on_the_cpu_takes_8b(fresh_seed: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 200, 64).bfloat16().unbind()
    assert torch.equal(comfy_sage2.attention(q, k, v, mode="auto"), comfy_sage2.attention(q, k, v, mode="8b"))
    assert comfy_sage2.explain(q, k, v, mode="auto") == comfy_sage2.explain(q, k, v, mode="8b")


def test_the_format_of_values_is_decided_with_the_mode() -> None:
    with pytest.raises(ValueError, match=r"SA-208.*pv must be 'auto' in mode 'auto'"):
        AttentionOptions("auto", pv="fp8")
