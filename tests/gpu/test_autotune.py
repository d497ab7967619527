"""Measuring a real GPU: what it needs, and that a candidate that becomes twelve times as slow loses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comfy_sage2.autotune import cache_file, measure, store
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Candidate, Work
from comfy_sage2.tuning_candidates import BACKENDS, BackendCandidates

pytestmark = pytest.mark.gpu

MEBIBYTE = 1 << 20
LONG = Work(32, 4096, 4096, 128)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(cache_file, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(measure, "_tried", set())
    monkeypatch.setattr(store, "_choices", {})
    yield


def measured(candidates: measure.Candidates = BACKENDS) -> TunedChoices:
    try:
        return measure.measure_now(torch.cuda.current_device(), candidates)
    except RuntimeError as error:
        pytest.skip(str(error))


def test_it_needs_little_memory_and_leaves_none() -> None:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS keeps memory from its first product on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    measured()
    assert torch.cuda.max_memory_allocated() - before <= 600 * MEBIBYTE  # of the GiB that has to be free
    assert torch.cuda.memory_allocated() == before


def test_it_leaves_random_numbers_alone() -> None:
    state = torch.cuda.get_rng_state()
    measured()
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_another_process_reads_what_was_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured()
    monkeypatch.setattr(store, "_choices", {})
    monkeypatch.setattr(measure, "_tried", set())
    monkeypatch.setattr(measure, "_measured", lambda *arguments: pytest.fail("it was measured again"))
    device = torch.device("cuda", torch.cuda.current_device())
    measure.prepare(device, BACKENDS)
    read = store.choices_of(device)
    assert read is not None and read.times == found.times and read.lines() == found.lines()


def test_a_slower_candidate_loses() -> None:
    exact = {one for one, _ in measured().times.seconds if one.backend.startswith("torch-")}
    assert len(exact) >= 2
    fastest = measured().fastest_first([one.backend for one in exact], LONG)[0]

    class Slowed(BackendCandidates):
        def calls(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
        ) -> dict[Candidate, measure.Run]:
            runs = super().calls(q, k, v, mask)
            run = runs[Candidate(fastest)]
            return {**runs, Candidate(fastest): lambda: [run() for _ in range(12)]}

    assert measured(Slowed()).fastest_first([one.backend for one in exact], LONG)[0] != fastest
