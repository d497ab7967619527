"""The scaling benchmark, tried out in two processes on the CPU: what it reports, not how fast."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from sequence_parallel.launch import ENGINE_MISSING, start

from lab.bench.scaling import Division, ScalingRow, divisions, main, table


def test_divisions_fit_processes_and_heads() -> None:
    assert divisions(4, 40) == [Division(4, 1), Division(2, 2), Division(1, 4)]
    assert divisions(8, 12) == [Division(4, 2), Division(2, 4), Division(1, 8)]
    assert [str(division) for division in divisions(4, 40)] == ["ulysses 4", "ulysses 2 x ring 2", "ring 4"]


def test_table() -> None:
    text = table([ScalingRow("ring 4", 50.0, 40.0, 3.2, 0.8, 0.04)])
    assert text.splitlines()[-1] == "| ring 4 | 50.00 | 40.00 | 3.20 | 80% | 4.0e-02 |"


def test_needs_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match=r"torch\.distributed\.run"):
        main([])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("yunchang") is None, reason=ENGINE_MISSING)
def test_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    arguments = ["--device=cpu", "--backend=reference", "--shape=wan-1.3b-480p", "--length=256", "--rounds=1"]
    start(2, "lab.bench.scaling", [*arguments, "--modes", "8b", f"--json={file}"])
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["gpus"] == 2
    one, ulysses, ring = document["modes"]["8b"]
    assert [row["division"] for row in (one, ulysses, ring)] == ["one GPU", "ulysses 2", "ring 2"]
    for row in (ulysses, ring):
        assert row["speedup"] == pytest.approx(one["call_ms"] / row["call_ms"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / 2)
    assert ulysses["distance"] < 1e-5
    assert 1e-3 < ring["distance"] < 0.08  # quantization noise of Gaussian inputs: other groups, other rounding
