"""Measuring a real GPU: its memory, its random numbers, and that a candidate made twelve times slower loses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comfy_sage2.autotune import cache_file, store
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Candidate, Work
from comfy_sage2.timing import candidates, measure

pytestmark = pytest.mark.gpu

MEBIBYTE = 1 << 20
LONG = Work(32, 4096, 4096, 128)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(cache_file, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(measure, "_tried", set())
    monkeypatch.setattr(store, "_choices", {})
    yield


def measured() -> TunedChoices:
    try:
        return measure.measure_now(torch.cuda.current_device())
    except RuntimeError as error:
        pytest.skip(str(error))


def test_measuring_needs_little_memory_and_frees_it() -> None:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS keeps memory from its first product on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    measured()
    assert torch.cuda.max_memory_allocated() - before <= 600 * MEBIBYTE  # of 1 GiB, which must be free
    assert torch.cuda.memory_allocated() <= before  # what an earlier test left may have been freed


def test_measuring_keeps_the_random_state() -> None:
    state = torch.cuda.get_rng_state()
    measured()
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_slower_candidate_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {candidate for candidate, _ in measured().times.seconds if candidate.backend.startswith("torch-")}
    assert len(exact) >= 2
    fastest = measured().fastest_first([candidate.backend for candidate in exact], LONG)[0]

    calls = candidates.calls

    def slowed(*tensors: torch.Tensor | None) -> dict[Candidate, candidates.Run]:
        runs = calls(*tensors)  # type: ignore[arg-type]
        run = runs[Candidate(fastest)]
        return {**runs, Candidate(fastest): lambda: [run() for _ in range(12)]}

    monkeypatch.setattr(candidates, "calls", slowed)
    assert measured().fastest_first([candidate.backend for candidate in exact], LONG)[0] != fastest
