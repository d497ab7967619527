"""The results page of `bench`, whose tables other pages quote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..result_page import table
from .accuracy import INPUTS, Accuracies
from .candidates import BenchmarkCandidate
from .shapes import GROUPS
from .speed import CandidateSpeed, ShapeResult

NOTHING = "–"
CPU_BOUND = "limited by its Python, not by the GPU"


@dataclass
class Measured:
    """What a run has measured so far.

    Attributes:
        candidates: all of them; missing: those that cannot run here, with the reason.
        accuracy: head_dim -> the result of `accuracy.measure`.
        results: those of each shape.
        kernel_problem: why there are no kernel times, or None.
    """

    candidates: Sequence[BenchmarkCandidate]
    missing: Mapping[str, str]
    accuracy: dict[int, Accuracies] = field(default_factory=dict)
    results: list[ShapeResult] = field(default_factory=list)
    kernel_problem: str | None = None


def _speed_cell(speed: CandidateSpeed, result: ShapeResult, part: str) -> str:
    """TFLOP/s and spread, such as "812 (1%)"; an asterisk marks calls that wait for the CPU."""
    rounds = getattr(speed, part)
    if rounds is None:
        return NOTHING
    bound = "*" if part == "call" and speed.is_cpu_bound else ""
    return f"{result.shape.teraflops(rounds.median):.0f}{bound} ({rounds.spread:.0%})"


def _by_shape(measured: Measured, part: str) -> list[str]:
    """A row for each shape, a column for each candidate that has a value: `part` is call, kernel or peak."""

    def cell(result: ShapeResult, name: str) -> str:
        speed = result.speeds.get(name)
        if speed is None:
            return NOTHING
        if part == "peak":
            return NOTHING if speed.peak is None else f"{speed.peak:.2f}"
        return _speed_cell(speed, result, part)

    names = [candidate.name for candidate in measured.candidates]
    cells = {result.shape.name: {name: cell(result, name) for name in names} for result in measured.results}
    columns = [name for name in names if any(row[name] != NOTHING for row in cells.values())]
    return table(["shape", *columns], ([shape, *(row[name] for name in columns)] for shape, row in cells.items()))


def _accuracy(measured: Measured) -> Iterator[str]:
    """For each head_dim the errors of every candidate, for each kind of inputs."""
    parts = [f"{kind}: {part}" for kind in INPUTS for part in ("all", "row", "channel")]
    for head_dim, (errors, _) in measured.accuracy.items():
        rows = []
        for name, kinds in errors.items():
            cells = [str(kinds[kind]).split(", ") if kind in kinds else [NOTHING] * 3 for kind in INPUTS]
            rows.append([name, *chain(*cells)])
        yield from ("", f"### head_dim {head_dim}", "", *table(["candidate", *parts], rows))


def _shapes(measured: Measured) -> Iterator[str]:
    """What the names of the shapes stand for; those of the paper's setup explain themselves."""
    shapes = [result.shape for result in measured.results]
    paper_shape = next((shape for shape in shapes if shape in GROUPS["paper"]), None)
    if paper_shape is not None:
        yield from (f"{paper_shape}, and others of this form alike.", "")
    others = [shape for shape in shapes if shape not in GROUPS["paper"]]
    if others:
        yield from (*table(["shape", "what it is"], (str(shape).split(": ", 1) for shape in others)), "")


def _not_measured(measured: Measured) -> Iterator[str]:
    """A line for each candidate or figure that is missing, and why."""
    yield from (f"- {name}: {reason}" for name, reason in measured.missing.items())
    for head_dim, (_, failures) in measured.accuracy.items():
        yield from (f"- {name}, accuracy at head_dim {head_dim}: {reason}" for name, reason in failures.items())
    shapes: dict[tuple[str, str], list[str]] = {}
    for result in measured.results:
        for name, reason in result.failures.items():
            shapes.setdefault((name, reason), []).append(result.shape.name)
    yield from (f"- {name}, {', '.join(names)}: {reason}" for (name, reason), names in shapes.items())
    if measured.kernel_problem is not None:
        yield f"- kernels: {measured.kernel_problem}"


def body(measured: Measured) -> list[str]:
    """The page below its head."""
    rounds = sorted({speed.rounds for result in measured.results for speed in result.speeds.values()}) or [0]
    return [
        "Candidates take turns in an order drawn anew in every round, for events and for the profiler; in its turn a "
        f"candidate first runs untimed. Medians of {' to '.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))} "
        "rounds, in brackets (most − least) / median. Inputs are Gaussian, bf16 unless the name says otherwise. "
        "[Measuring](../dev/measuring.md) has the method.",
        "",
        *table(
            ["candidate", "version", "note"], ([each.name, each.version, each.note] for each in measured.candidates)
        ),
        "",
        *_shapes(measured),
        "## Calls",
        "",
        "Whole calls with quantization, TFLOP/s: 4·B·H·Nq·Nkv·D / time, half of it when causal; masks save nothing. "
        f"*: {CPU_BOUND}.",
        "",
        *_by_shape(measured, "call"),
        "",
        "## Kernels",
        "",
        "The attention alone, TFLOP/s, by the profiler.",
        "",
        *_by_shape(measured, "kernel"),
        "",
        "## Accuracy",
        "",
        "B 1, H 8, N 4,096 against float64: relative L1 of all values, of the worst row, of the worst channel of a "
        "head. Outliers: Q + 10 and K ± 20 on six channels, V + 8.5.",
        *_accuracy(measured),
        "",
        "## Memory",
        "",
        "Peak of the bytes that a call needs beyond its inputs, in multiples of its output: 1 is the output alone.",
        "",
        *_by_shape(measured, "peak"),
        "",
        "## Not measured",
        "",
        *_not_measured(measured),
    ]
