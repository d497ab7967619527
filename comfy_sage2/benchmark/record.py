"""The result as one JSON document: what `--json` and `--share` write. Nothing in it tells whose machine it was."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..metrics import Agreement
from .candidates import Candidate
from .speed import ShapeResult, Speed

FORMAT = 1

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
    candidates: list[Candidate],
    missing: dict[str, str],
    accuracies: dict[str, dict[str, Agreement]],
    accuracy_failures: dict[str, str],
    results: list[ShapeResult],
    kernel_problem: str | None,
) -> dict[str, Any]:
    """The document, of plain values only. Times are medians in milliseconds, speeds 10^12 operations a second."""
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
        "speed_failures": {result.shape.name: result.failures for result in results if result.failures},
        "kernel_times": "measured" if kernel_problem is None else kernel_problem,
    }
    return without_folders(document)


def _speed(speed: Speed) -> dict[str, Any]:
    shape = asdict(speed.shape)
    values = asdict(speed) | {"shape": shape}
    for part in ("call", "kernel"):
        milliseconds = values[f"{part}_ms"]
        values[f"{part}_tflops"] = None if milliseconds is None else speed.shape.teraflops(milliseconds)
    return values


def share_name(machine: dict[str, Any]) -> str:
    """The name of a file to send: the GPU's name in letters, digits and hyphens."""
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    return f"comfy-sage2-bench-{gpu}.json"


def write(document: dict[str, Any], path: Path) -> None:
    """Write the document. OSError when that is not possible."""
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
