"""Results as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from comfy_sage2.metrics import Agreement

from .accuracy import INPUTS
from .speed import CandidateSpeed, ShapeResult
from .sustained import Sustained

BASELINE = "torch flash"
CPU_BOUND = "limited by its Python, not by the GPU"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def speed_lines(result: ShapeResult, notes: dict[str, str]) -> Iterator[str]:
    """One shape: kernel only and whole call, with spread and speed beside the baseline's; extra memory, failures."""
    yield str(result.shape)
    baseline = next((speed for speed in result.speeds if speed.candidate == BASELINE), None)
    part = ("TFLOP/s", "spread", f"x {BASELINE}")
    header = ("", "kernel ms", *part, "call ms", *part, "extra memory")
    rows = [_speed_row(speed, baseline) for speed in result.speeds]
    yield from table(header, rows)
    for name, reason in result.failures.items():
        yield f"{name}: {reason}"
    for speed in result.speeds:
        if notes.get(speed.candidate):
            yield f"{speed.candidate}: {notes[speed.candidate]}"
        if speed.is_cpu_bound:
            yield f"{speed.candidate}: {CPU_BOUND} ({speed.cpu_ms:.3f} ms a call)"


def _speed_row(speed: CandidateSpeed, baseline: CandidateSpeed | None) -> tuple[str, ...]:
    cells = [speed.candidate]
    others = (None, None) if baseline is None else (baseline.kernel or baseline.call, baseline.call)
    for rounds, other in zip((speed.kernel, speed.call), others, strict=True):
        if rounds is None:
            cells += ["-"] * 4
            continue
        cells += [
            f"{rounds.median:.3f}" if rounds.median < 10 else f"{rounds.median:.1f}",
            f"{speed.shape.teraflops(rounds.median):.0f}",
            f"{rounds.spread:.0%}",
            _number(None if other is None else other.median / rounds.median),
        ]
    cells.append(_number(speed.extra_memory))
    return tuple(cells)


def sustained_lines(results: Sequence[Sustained]) -> Iterator[str]:
    """One shape: every candidate alone."""
    header = ("", "TFLOP/s", "W", "MHz")
    rows = [
        (
            f"{result.candidate} {result.part}",
            f"{result.shape.teraflops(result.milliseconds):.0f}",
            "-" if result.watts is None else f"{result.watts:.0f}",
            "-" if result.megahertz is None else f"{result.megahertz:.0f}",
        )
        for result in results
    ]
    yield from table(header, rows)


def accuracy_lines(accuracies: dict[str, dict[str, Agreement]], failures: dict[str, str]) -> Iterator[str]:
    """All candidates against float64, on both kinds of inputs."""
    header = [""]
    for kind in INPUTS:
        header += [f"{kind}: cosine", "relative L1", "RMSE"]
    rows = []
    for name, kinds in accuracies.items():
        cells = [name]
        for kind in INPUTS:
            accuracy = kinds.get(kind)
            cells += (
                ["-", "-", "-"]
                if accuracy is None
                else [f"{accuracy.cosine:.6f}", f"{accuracy.relative_l1:.4f}", f"{accuracy.rmse:.2e}"]
            )
        rows.append(cells)
    yield from table(header, rows)
    for name, reason in failures.items():
        yield f"{name}: {reason}"
