"""What `bench --results` writes has every row and column that other pages take from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lab.bench.accuracy import INPUTS
from lab.bench.page import LABELS, page
from lab.bench.shapes import GROUPS
from tools import quotes

QUOTED = "attention-h100-80gb-hbm3.md"
CANDIDATES = [*LABELS, "sageattention 2 per thread", "sageattention 2 per warp"]


@pytest.fixture
def document() -> dict[str, Any]:
    """That of a run on an H200 in which every candidate was measured on every shape."""
    shapes = list({shape.name for name in ("paper", "video", "calls") for shape in GROUPS[name]})
    measured = {"call_spread": 0.01, "kernel_spread": 0.01, "is_cpu_bound": False, "extra_memory": 0.5, "rounds": 5}
    return {
        "machine": {
            "gpu": "NVIDIA H200", "torch": "2.11.0", "cudnn": 91900, "python": "3.12.3", "system": "Linux x86_64",
            "driver": {}, "kernels": {},
        },
        "settings": {"seconds": 10.0, "seed": 7, "heat_seconds": 30.0},
        "candidates": {name: {"version": "2.2.0", "note": ""} for name in CANDIDATES},
        "missing": {},
        "accuracy": {
            name: {kind: {"cosine": 0.9993, "relative_l1": 0.0375, "rmse": 1e-3} for kind in INPUTS}
            for name in CANDIDATES
        },
        "accuracy_failures": {},
        "speed": [
            {"shape": {"name": shape}, "candidate": name, "call_tflops": 800.0, "kernel_tflops": 900.0, **measured}
            for shape in shapes
            for name in CANDIDATES
        ],
        "sustained": [],
        "speed_failures": {},
        "kernel_times": "measured",
    }  # fmt: skip


def test_quotes_can_be_made_from_it(document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    text = page(document, "python -m lab bench --results docs/results", "2026-11-23")
    (folder / QUOTED).write_text(text, encoding="utf-8")
    written = [page.read_text(encoding="utf-8") for page in quotes.documents()]
    monkeypatch.setattr(quotes, "REPOSITORY", tmp_path)
    quoted = [quotes.renewed(text) for text in written if f"<!-- quote docs/results/{QUOTED}" in text]
    assert quoted, "no page quotes the bench"
    assert all(re.search(r"^\| d128-n8192 \| 800 \| 800 \| 800 \| 900 \|", text, re.MULTILINE) for text in quoted)


@pytest.mark.parametrize(("others", "said"), [(5, "Medians of 5 rounds."), (9, "Medians of 5 to 9 rounds.")])
def test_the_rounds_are_counted(document: dict[str, Any], others: int, said: str) -> None:
    for speed in document["speed"][1:]:
        speed["rounds"] = others
    assert said in page(document, "python -m lab bench", "2026-11-23")


def test_what_failed_stands_there(document: dict[str, Any]) -> None:
    document["accuracy_failures"] = {"cuDNN fp8": "RuntimeError: no plan"}
    document["speed_failures"] = {"hunyuan-720p": {"all candidates": "OutOfMemoryError: 9 GiB"}}
    document["kernel_times"] = "the profiler does not start"
    document["candidates"]["cuDNN fp8"]["note"] = "quantization not timed"
    text = page(document, "python -m lab bench", "2026-11-23")
    assert text.endswith(
        "## Not measured\n\n- cuDNN fp8, accuracy: RuntimeError: no plan\n"
        "- all candidates, hunyuan-720p: OutOfMemoryError: 9 GiB\n- kernels: the profiler does not start\n"
        "- cuDNN FP8: quantization not timed\n"
    )


def test_a_run_without_results_makes_a_page(document: dict[str, Any]) -> None:
    document["speed"] = []
    assert "## Not measured" in page(document, "python -m lab bench", "2026-11-23")
