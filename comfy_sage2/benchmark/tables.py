"""Results as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..metrics import Agreement
from .accuracy import INPUTS
from .speed import ShapeResult, Speed

BASELINE = "torch flash"


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
    """One shape: kernel only and whole call, speed relative to the baseline's kernel, extra memory, failures."""
    yield str(result.shape)
    baseline = next((speed.kernel_ms or speed.call_ms for speed in result.speeds if speed.candidate == BASELINE), None)
    header = ("", "kernel ms", "TFLOP/s", f"x {BASELINE}", "call ms", "TFLOP/s", f"x {BASELINE}", "extra memory")
    rows = [_speed_row(speed, baseline) for speed in result.speeds]
    yield from table(header, rows)
    for name, reason in result.failures.items():
        yield f"{name}: {reason}"
    for speed in result.speeds:
        if notes.get(speed.candidate):
            yield f"{speed.candidate}: {notes[speed.candidate]}"


def _speed_row(speed: Speed, baseline: float | None) -> tuple[str, ...]:
    cells = [speed.candidate]
    for milliseconds in (speed.kernel_ms, speed.call_ms):
        if milliseconds is None:
            cells += ["-", "-", "-"]
            continue
        ratio = None if baseline is None else baseline / milliseconds
        cells += [
            f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}",
            f"{speed.shape.teraflops(milliseconds):.0f}",
            _number(ratio),
        ]
    cells.append(_number(speed.extra_memory))
    return tuple(cells)


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
