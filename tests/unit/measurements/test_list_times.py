"""The page of times with block masks, with stand-ins for the GPU's clock and its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.kernels import loader
from lab.bench.candidates import PreparedCandidate
from lab.bench.timing import Timed
from lab.measurements import list_times

TIMES = {list_times.DENSE: 4.0, list_times.LISTED[0]: 4.0, list_times.LISTED[-1]: 2.0}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_times, "heat", lambda seconds: None)
    monkeypatch.setattr(list_times, "explain", lambda *_, **__: {"sm90": None, "reference": None})
    monkeypatch.setattr(loader, "load", lambda name: SimpleNamespace(version="9.9"))


def in_rounds(subjects: Mapping[str, PreparedCandidate], *_: Any) -> dict[str, Timed]:
    assert all(subject.kernel_name in ("attention_", "precise_") for subject in subjects.values())
    return {name: Timed(0.0, [TIMES.get(name, 3.0)], [TIMES[name] / 2] if name in TIMES else []) for name in subjects}


def test_the_page_compares_with_the_dense_call(monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> None:
    monkeypatch.setattr(list_times, "time_in_rounds", in_rounds)
    text = list_times.page("python -m lab lists", torch.device("cpu"), 256, 7, 1)
    assert f"{registry.get('sm90').least_skipped('precise'):.0%} (precise) of the blocks are skipped" in text
    whole, alone = text.split("## Attention kernels alone")
    assert "- Kernels: sm90 9.9.\n" in whole
    assert "- Command: `python -m lab lists`, which wrote this page; seed 7.\n" in whole
    assert "| 8b | 64 | no | 4.000 | 4.000 (1.00) | 3.000 (1.33) | 3.000 (1.33) | 2.000 (2.00) |" in whole
    assert "| precise | 256 | no | 2.000 | 2.000 (1.00) | – | – | 1.000 (2.00) |" in alone


def test_each_call_is_what_its_name_says(monkeypatch: pytest.MonkeyPatch, stand_ins: None, fresh_seed: int) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(list_times, "attention", lambda *_, **options: called.append(options))
    case = list_times.BlockMaskCase("8b", 64, is_causal=False)
    backend, subjects = list_times.subjects(case, 1024, torch.device("cpu"))
    assert backend == "sm90" and list(subjects) == [list_times.DENSE, *list_times.LISTED]
    for subject in subjects.values():
        subject.call.run()
    dense, *listed = called
    assert dense.get("block_mask") is None
    counts = [options["block_mask"].lists[..., 0].sum().item() for options in listed]
    assert counts[0] == list_times.HEADS * 64 and counts == sorted(counts, reverse=True)
    assert counts[-1] < 0.4 * counts[0]


def test_without_kernels_that_take_lists_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_times, "explain", lambda *_, **__: {"sm90": "too old", "reference": None})
    with pytest.raises(SystemExit, match="sm90: too old"):
        list_times.subjects(list_times.CASES[0], 256, torch.device("cpu"))


def test_lists_are_taken_from_where_they_pay() -> None:
    """The share from which on a call with lists is faster, by the page: between its rows of 0 and of 28 % by a line."""
    page = (Path(__file__).parents[3] / "docs" / "results" / "list-times.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| 8b |", "| precise |"))]
    assert len(rows) >= 24
    for mode, head_dim, causal, dense, all_blocks, fewer, *_ in rows:
        first, second = (float(cell.split()[0]) for cell in (all_blocks, fewer))
        even = 0.28 * (first - float(dense)) / (first - second)
        assert even <= registry.get("sm90").least_skipped(mode) < 0.28, (mode, head_dim, causal)
