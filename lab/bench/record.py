"""The result as one JSON document: what `--json` writes. Nothing in it tells whose machine it was."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comfy_sage2.metrics import Agreement

from . import page
from .candidates import BenchmarkCandidate
from .gpu import short_name, without_home
from .speed import CandidateSpeed, ShapeResult
from .sustained import Sustained

FORMAT = 3


def build(
    *,
    machine: dict[str, Any],
    settings: dict[str, Any],
    candidates: list[BenchmarkCandidate],
    missing: dict[str, str],
    accuracies: dict[str, dict[str, Agreement]],
    accuracy_failures: dict[str, str],
    results: list[ShapeResult],
    sustained: list[Sustained],
    kernel_problem: str | None,
) -> dict[str, Any]:
    """The document, of plain values only.

    Times are medians over rounds in milliseconds, speeds 10^12 operations a second; a spread is (most - least) /
    median.
    """
    document = {
        "format": FORMAT,
        "machine": machine,
        "settings": settings,
        "candidates": {item.name: {"version": item.version, "note": item.note} for item in candidates},
        "missing": missing,
        "accuracy": {
            name: {kind: asdict(accuracy) for kind, accuracy in kinds.items()} for name, kinds in accuracies.items()
        },
        "accuracy_failures": accuracy_failures,
        "speed": [_speed(speed) for result in results for speed in result.speeds],
        "sustained": [_sustained(result) for result in sustained],
        "speed_failures": {result.shape.name: result.failures for result in results if result.failures},
        "kernel_times": "measured" if kernel_problem is None else kernel_problem,
    }
    result: dict[str, Any] = json.loads(without_home(json.dumps(document)))
    return result


def _speed(speed: CandidateSpeed) -> dict[str, Any]:
    values: dict[str, Any] = {
        "shape": asdict(speed.shape),
        "candidate": speed.candidate,
        "cpu_ms": speed.cpu_ms,
        "is_cpu_bound": speed.is_cpu_bound,
        "extra_memory": speed.extra_memory,
        "rounds": speed.rounds,
    }
    for part, rounds in (("call", speed.call), ("kernel", speed.kernel)):
        values[f"{part}_ms"] = None if rounds is None else rounds.median
        values[f"{part}_spread"] = None if rounds is None else rounds.spread
        values[f"{part}_tflops"] = None if rounds is None else speed.shape.teraflops(rounds.median)
    return values


def _sustained(result: Sustained) -> dict[str, Any]:
    return asdict(result) | {"tflops": result.shape.teraflops(result.milliseconds)}


def write(document: dict[str, Any], path: Path) -> None:
    """Write the document as JSON. OSError when that is not possible."""
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_page(document: dict[str, Any], folder: Path, command: str) -> Path:
    """Write the document as attention-GPU.json and as the page attention-GPU.md; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"attention-{short_name(document['machine'])}.md"
    write(document, path.with_suffix(".json"))
    today = datetime.date.today().isoformat()
    path.write_text(page.page(document, without_home(command), today), encoding="utf-8")
    return path
