"""The patch of a model whose tokens diffusers divides among processes (Ulysses), on the CPU (gloo)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sequence_parallel.launch import start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_divided_model_gives_the_same(processes: int, tmp_path: Path) -> None:
    start(processes, "sequence_parallel.diffusers_worker", ["--device=cpu", "--backend=reference", f"--out={tmp_path}"])
    for rank in range(processes):
        outputs = load_file(tmp_path / f"rank{rank}.safetensors")
        counts = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert counts == {"calls": {"reference": 4}, "fallbacks": {}}  # self- and cross-attention of two layers
        quantization = (outputs["undivided"] - outputs["full"]).abs().mean()
        division = (outputs["divided"] - outputs["undivided"]).abs().mean()
        assert quantization > 0
        assert division < 0.1 * quantization
