"""The result as one JSON document: what `--json` and `--share` write. Nothing in it tells whose machine it was."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..metrics import Agreement
from . import page
from .ablations import Ablation
from .candidates import BenchmarkCandidate
from .speed import CandidateSpeed, ShapeResult
from .sustained import Sustained

FORMAT = 3

# A folder in an error message may hold a user's name: of an absolute path only the last part is kept. Separators may be
# of either kind, and doubled where a message quotes a path; a name in between may hold blanks, but not at its ends.
_FOLDERS = re.compile(
    r"""(?<![\w.:/\\])(?:[A-Za-z]:)?[/\\]+(?:[^\s'"/\\:*?<>|](?:[^'"/\\:*?<>|\r\n]*[^\s'"/\\:*?<>|])?[/\\]+)+"""
)


def _home() -> re.Pattern[str]:
    """The user's own folder in every spelling: Windows knows no case, and takes either separator."""
    parts = [re.escape(part) for part in re.split(r"[/\\]+", str(Path.home())) if part]
    # A home of "/" has no name to hide.
    return re.compile(r"[/\\]*" + r"[/\\]+".join(parts) + r"(?!\w)" if parts else r"(?!)", re.IGNORECASE)


def without_folders(value: Any) -> Any:
    """A JSON value in which the absolute paths of all texts are reduced to their last part."""
    if isinstance(value, str):
        return _FOLDERS.sub("", _home().sub("", value))
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return value


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
    ablations: list[Ablation],
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
        "ablations": [asdict(result) for result in ablations],
        "speed_failures": {result.shape.name: result.failures for result in results if result.failures},
        "kernel_times": "measured" if kernel_problem is None else kernel_problem,
    }
    result: dict[str, Any] = without_folders(document)
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


def share_name(machine: dict[str, Any]) -> str:
    """The name of a file to send."""
    return f"comfy-sage2-bench-{gpu_name(machine)}.json"


def gpu_name(machine: dict[str, Any]) -> str:
    """The GPU's name for file names: letters, digits and hyphens, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")


def write_page(document: dict[str, Any], folder: Path, command: str) -> Path:
    """Write the document as attention-GPU.json and as the page attention-GPU.md; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    short = gpu_name(document["machine"]).removeprefix("nvidia-")
    path = folder / f"attention-{short}.md"
    write(document, path.with_suffix(".json"))
    today = datetime.date.today().isoformat()
    path.write_text(page.page(document, without_folders(command), today), encoding="utf-8")
    return path


def write(document: dict[str, Any], path: Path) -> None:
    """Write the document. OSError when that is not possible."""
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
