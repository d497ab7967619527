"""A result document as a page of docs/results/, whose tables other pages quote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..result_page import page_head
from .tables import CPU_BOUND

# How tables call the candidates of `bench`; others keep their name.
LABELS = {
    "sm90 8b": "8b",
    "sm90 4b": "4b",
    "sm90 precise": "precise",
    "sm90 8b rotate auto": "8b, auto",
    "sm90 4b rotate auto": "4b, auto",
    "sm90 precise rotate auto": "precise, auto",
    "sm90 8b smooth_v": "8b, smooth V",
    "sm90 4b smooth_v": "4b, smooth V",
    "sm90 precise smooth_v": "precise, smooth V",
    "torch flash": "FA-2",
    "torch cuDNN": "cuDNN 16-bit",
    "cuDNN fp8": "cuDNN FP8",
    "comfy-kitchen int8": "comfy-kitchen INT8",
    "torch efficient": "torch efficient",
    "FlashAttention-3": "FA-3 16-bit",
    "FlashAttention-3 fp8": "FA-3 FP8",
}
NOTHING = "–"


def _label(candidate: str, document: dict[str, Any]) -> str:
    """How tables call a candidate; SageAttention with its version, as "Sage 2.2, per thread"."""
    if not candidate.startswith("sageattention"):
        return LABELS.get(candidate, candidate)
    version = ".".join(document["candidates"][candidate]["version"].split(".")[:2])
    _, _, granularity = candidate.partition(" per ")
    return f"Sage {version}" + (f", per {granularity}" if granularity else "")


def _family(label: str) -> str:
    """What speeds are listed under: of several granularities the fastest stands for all."""
    return label.partition(", per ")[0]


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _cells(document: dict[str, Any], value: str) -> list[str]:
    """A row for each shape, a column for kernel and call of each candidate that was measured.

    value: "tflops", the larger the better, or "spread".
    """
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for speed in document["speed"]:
        for part in ("kernel", "call"):
            if speed[f"{part}_tflops"] is None:
                continue
            place = speed["shape"]["name"], f"{_family(_label(speed['candidate'], document))} {part}"
            if place not in best or speed[f"{part}_tflops"] > best[place][f"{part}_tflops"]:
                best[place] = speed
    shapes = list(dict.fromkeys(speed["shape"]["name"] for speed in document["speed"]))
    families = dict.fromkeys(_family(_label(candidate, document)) for candidate in document["candidates"])
    columns = [
        f"{family} {part}"
        for family in families
        for part in ("kernel", "call")
        if any((shape, f"{family} {part}") in best for shape in shapes)
    ]

    def cell(shape: str, column: str) -> str:
        speed = best.get((shape, column))
        if speed is None:
            return NOTHING
        part = column.rpartition(" ")[2]
        if value == "spread":
            return f"{speed[f'{part}_spread']:.0%}"
        return f"{speed[f'{part}_tflops']:.0f}" + ("*" if part == "call" and speed["is_cpu_bound"] else "")

    return _table(["shape", *columns], ([shape, *(cell(shape, column) for column in columns)] for shape in shapes))


def speed_table(document: dict[str, Any]) -> list[str]:
    """TFLOP/s of medians; an asterisk marks calls that wait for the CPU."""
    return _cells(document, "tflops")


def spread_table(document: dict[str, Any]) -> list[str]:
    """(most - least) / median of the rounds."""
    return _cells(document, "spread")


def sustained_table(document: dict[str, Any]) -> list[str]:
    """A row for each candidate; for each shape TFLOP/s, W and MHz."""
    found = {(one["candidate"], one["shape"]["name"]): one for one in document["sustained"]}
    shapes = list(dict.fromkeys(shape for _, shape in found))
    header = ["candidate"]
    for shape in shapes:
        header += [shape, f"{shape}: W", f"{shape}: MHz"]
    rows = []
    for candidate in dict.fromkeys(candidate for candidate, _ in found):
        part = next(one["part"] for (name, _), one in found.items() if name == candidate)
        cells = [_label(candidate, document) + (" kernel" if part == "kernel" else "")]
        for shape in shapes:
            one = found.get((candidate, shape))
            values = (None,) * 3 if one is None else (one["tflops"], one["watts"], one["megahertz"])
            cells += [NOTHING if value is None else f"{value:.0f}" for value in values]
        rows.append(cells)
    return _table(header, rows)


def accuracy_table(document: dict[str, Any]) -> list[str]:
    """Cosine and relative L1 of every candidate, for each kind of inputs."""
    kinds = list(dict.fromkeys(kind for found in document["accuracy"].values() for kind in found))
    header = ["candidate"]
    for kind in kinds:
        header += [f"{kind}: cosine", f"{kind}: relative L1"]
    rows = []
    for candidate, found in document["accuracy"].items():
        cells = [_label(candidate, document)]
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
            rows.append([_label(candidate, document), f"{min(found):.2f} to {max(found):.2f}"])
    return _table(["candidate", "extra memory"], rows)


def _not_measured(document: dict[str, Any]) -> Iterator[str]:
    """A line for each candidate or figure that is missing, and why; then what the candidates' figures leave out."""
    for name, reason in document["missing"].items():
        yield f"- {name}: {reason}"
    for name, reason in document["accuracy_failures"].items():
        yield f"- {name}, accuracy: {reason}"
    for shape, failures in document["speed_failures"].items():
        for name, reason in failures.items():
            yield f"- {name}, {shape}: {reason}"
    if document["kernel_times"] != "measured":
        yield f"- kernels: {document['kernel_times']}"
    for name, about in document["candidates"].items():
        if about["note"]:
            yield f"- {_label(name, document)}: {about['note']}"


def page(document: dict[str, Any], command: str, date: str) -> str:
    """The whole page; `command` made the document on the day `date`."""
    machine, settings = document["machine"], document["settings"]
    driver = machine["driver"]
    power = f"power limit {driver['power.limit']}, " if "power.limit" in driver else ""
    wheels = {kernel["wheel"] for kernel in machine["kernels"].values() if "wheel" in kernel}
    rounds = sorted({speed["rounds"] for speed in document["speed"]}) or [0]
    counted = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    peers = [f"{_label(name, document)} is {name} {about['version']}" for name, about in document["candidates"].items()]
    lines = [
        *page_head(
            f"One attention call on one {machine['gpu']}, beside its peers",
            machine=f"one {machine['gpu']} ({power}driver {driver.get('driver_version', 'unknown')}), "
            f"torch {machine['torch']}, cuDNN {machine['cudnn']}, CPython {machine['python']}, {machine['system']}",
            kernels=", ".join(sorted(wheels)) or "a development build",
            settings="the attention function; `rotate` off, and in columns and rows with *auto* as a new node has it",
            command=command,
            day=date,
        )[:-1],
        f"- Candidates: {'; '.join(peers)}.",
        "",
        "Candidates take turns in an order drawn anew in every round, for events and for the profiler "
        f"(seed {settings['seed']}). The GPU runs matrix products for {settings['heat_seconds']:.0f} s before; in its "
        "turn a candidate first runs untimed. "
        f"Medians of {counted} rounds. Inputs are Gaussian, bf16 unless the name says otherwise. "
        "`d128-n8192` is B 4, H 32, N 8,192, head_dim 128. Call: quantization included; kernel: the attention alone. "
        "Of Sage's granularities the faster one is listed. [Measuring](../dev/measuring.md) has the method.",
        "",
        "## Speed",
        "",
        f"TFLOP/s: 4·B·H·Nq·Nkv·D / time, half of it when causal; masks save nothing. *: {CPU_BOUND}.",
        "",
        *speed_table(document),
        "",
        "## Spread",
        "",
        "(Most − least) / median of the rounds.",
        "",
        *spread_table(document),
        "",
    ]
    if document["sustained"]:
        lines += [
            "## Sustained",
            "",
            "Each candidate alone for 1.5 s, after 0.5 s to settle: TFLOP/s, W, MHz of the multiprocessors.",
            "",
            *sustained_table(document),
            "",
        ]
    lines += [
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
        *_not_measured(document),
    ]
    return "\n".join(lines).rstrip() + "\n"
