"""The results file of docs/ from what `python -m comfy_sage2 bench --json FILE` wrote.

    python -m tools.bench_results bench.json docs/results/attention-h200.md \
        --command "python -m comfy_sage2 bench --seconds 300 --json bench.json" --date 2026-11-22

`python -m tools.quotes` then renews the tables that quote it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# How tables call the candidates of `bench`; others keep their name.
LABELS = {
    "sm90 8b": "8b",
    "sm90 4b": "4b",
    "sm90 8b smooth_v": "8b, smooth V",
    "sm90 4b smooth_v": "4b, smooth V",
    "torch flash": "FA-2",
    "torch cuDNN": "cuDNN 16-bit",
    "cuDNN fp8": "cuDNN FP8",
    "comfy-kitchen int8": "comfy-kitchen INT8",
    "sageattention 1": "Sage 1",
    "sageattention 2": "Sage 2.2",
    "FlashAttention-3": "FA-3 16-bit",
    "FlashAttention-3 fp8": "FA-3 FP8",
}
NOTHING = "–"


def _label(candidate: str) -> str:
    return LABELS.get(candidate, candidate)


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def speed_table(document: dict[str, Any]) -> list[str]:
    """TFLOP/s: a row for each shape, a column for each candidate's kernel and whole call that was measured."""
    values = {
        (speed["shape"]["name"], speed["candidate"], part): speed[f"{part}_tflops"]
        for speed in document["speed"]
        for part in ("kernel", "call")
        if speed[f"{part}_tflops"] is not None
    }
    shapes = dict.fromkeys(speed["shape"]["name"] for speed in document["speed"])
    columns = [
        (candidate, part)
        for candidate in document["candidates"]
        for part in ("kernel", "call")
        if any((shape, candidate, part) in values for shape in shapes)
    ]
    rows = []
    for shape in shapes:
        cells = [values.get((shape, *column)) for column in columns]
        rows.append([shape, *(NOTHING if cell is None else f"{cell:.0f}" for cell in cells)])
    return _table(["shape", *(f"{_label(candidate)} {part}" for candidate, part in columns)], rows)


def accuracy_table(document: dict[str, Any]) -> list[str]:
    """Cosine and relative L1 of every candidate, for each kind of inputs."""
    kinds = list(dict.fromkeys(kind for found in document["accuracy"].values() for kind in found))
    header = ["candidate"]
    for kind in kinds:
        header += [f"{kind}: cosine", f"{kind}: relative L1"]
    rows = []
    for candidate, found in document["accuracy"].items():
        cells = [_label(candidate)]
        for kind in kinds:
            agreement = found.get(kind)
            cells += (
                [NOTHING, NOTHING]
                if agreement is None
                else [f"{agreement['cosine']:.6f}", f"{agreement['relative_l1']:.4f}"]
            )
        rows.append(cells)
    return _table(header, rows)


def memory_table(document: dict[str, Any]) -> list[str]:
    """Least and most extra memory of each candidate over the shapes."""
    rows = []
    for candidate in document["candidates"]:
        found = [
            speed["extra_memory"]
            for speed in document["speed"]
            if speed["candidate"] == candidate and speed["extra_memory"] is not None
        ]
        if found:
            rows.append([_label(candidate), f"{min(found):.2f} to {max(found):.2f}"])
    return _table(["candidate", "extra memory"], rows)


def page(document: dict[str, Any], command: str, date: str) -> str:
    """The whole results file."""
    machine = document["machine"]
    driver = machine["driver"]
    power = f"power limit {driver['power.limit']}, " if "power.limit" in driver else ""
    wheels = {kernel["wheel"] for kernel in machine["kernels"].values() if "wheel" in kernel}
    rounds = sorted({speed["rounds"] for speed in document["speed"]})
    lines = [
        f"# One attention call on one {machine['gpu']}, beside its peers",
        "",
        f"- Machine: one {machine['gpu']} ({power}driver {driver.get('driver_version', 'unknown')}), "
        f"torch {machine['torch']}, cuDNN {machine['cudnn']}, CPython {machine['python']}, {machine['system']}.",
        f"- Kernels: {', '.join(sorted(wheels)) or 'a development build'}.",
        f"- Command: `{command}`, then `python -m tools.bench_results`, which wrote this file.",
        f"- Date: {date}.",
        "",
        f"Inputs are Gaussian, {document['settings']['dtype']}. Medians of {rounds[0]} to {rounds[-1]} rounds. "
        "`d128-n8192` is B 4, H 32, N 8,192, head_dim 128. Call: quantization included; kernel: the attention alone. "
        "[Measuring](../dev/measuring.md) has the method.",
        "",
        "## Speed",
        "",
        "TFLOP/s: 4·B·H·Nq·Nkv·D / time, half of it when causal.",
        "",
        *speed_table(document),
        "",
        "## Accuracy",
        "",
        "B 1, H 8, N 4,096, head_dim 128 against float64. Outliers: Q + 10 and K ± 20 on six channels, V + 8.5.",
        "",
        *accuracy_table(document),
        "",
        "## Memory",
        "",
        "Bytes that one call allocates beyond inputs and output, relative to q, k and v in 16 bits.",
        "",
        *memory_table(document),
        "",
        "## Not measured",
        "",
        *[f"- {name}: {reason}" for name, reason in document["missing"].items()],
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="what bench wrote")
    parser.add_argument("output", type=Path, help="the results file")
    parser.add_argument("--command", required=True, help="the command that wrote the JSON")
    parser.add_argument("--date", required=True, help="the day of the measurement, as 2026-11-22")
    options = parser.parse_args()
    document = json.loads(options.json.read_text(encoding="utf-8"))
    options.output.write_text(page(document, options.command, options.date), encoding="utf-8")


if __name__ == "__main__":
    main()
