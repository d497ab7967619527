"""The pictures of README.md and docs/ that are drawn from a table of docs/results/.

python -m tools.charts          # draw them anew
python -m tools.charts --check  # say which differ, and change nothing
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .quotes import REPOSITORY, Table, table_below

_LABELS, _BARS, _VALUES = 210, 430, 60  # widths of the three columns, in pixels
_ROW, _BAR, _TITLE, _EDGE = 30, 20, 34, 14
_OTHERS, _OURS, _LIMIT = "#a8b3c2", "#1f6feb", "#dfe4ea"


@dataclass(frozen=True)
class Chart:
    """Horizontal bars: the first column of a results table names them, `column` has their lengths.

    The row `ours` is highlighted, the row `limit` pale.
    """

    picture: str
    results: str
    heading: str
    column: str
    title: str
    ours: str
    limit: str


CHARTS = (
    Chart(
        "docs/images/steps.svg",
        "docs/results/comfyui-steps-h100.md",
        "Peers",
        "Wan 14B 720p",
        "Seconds a sampling step: Wan 2.1 14B, 720p, 81 frames, one NVIDIA H100",
        ours="this node, 8b",
        limit="no attention (mean of V)",
    ),
)


def _plain(cell: str) -> str:
    return cell.strip("*")


def svg(table: Table, chart: Chart) -> str:
    """The picture of a table as SVG; ValueError when the table lacks the column or a cell is no number."""
    header, *rows = table
    if chart.column not in header:
        raise ValueError(f"{chart.results} has no column {chart.column!r}, it has {header}")
    values = [(_plain(row[0]), _plain(row[header.index(chart.column)])) for row in rows]
    longest = max(float(value) for _, value in values)
    width, height = _LABELS + _BARS + _VALUES + 2 * _EDGE, _TITLE + _ROW * len(values) + 2 * _EDGE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="14" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{_EDGE}" y="{_EDGE + 14}" font-weight="bold">{escape(chart.title)}</text>',
    ]
    for index, (name, value) in enumerate(values):
        top = _EDGE + _TITLE + _ROW * index
        text = top + _BAR - 5
        color = {chart.ours: _OURS, chart.limit: _LIMIT}.get(name, _OTHERS)
        weight = ' font-weight="bold"' if name == chart.ours else ""
        bar = round(_BARS * float(value) / longest)
        lines += [
            f'<text x="{_EDGE}" y="{text}"{weight}>{escape(name)}</text>',
            f'<rect x="{_EDGE + _LABELS}" y="{top}" width="{bar}" height="{_BAR}" rx="3" fill="{color}"/>',
            f'<text x="{_EDGE + _LABELS + bar + 8}" y="{text}"{weight}>{escape(value)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def drawn(chart: Chart) -> str:
    """The picture as its results file has it now."""
    return svg(table_below((REPOSITORY / chart.results).read_text(encoding="utf-8"), chart.heading), chart)


def main() -> int:
    """The command; 1 when a picture differs, with --check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    differing = [chart for chart in CHARTS if drawn(chart) != _text(REPOSITORY / chart.picture)]
    for chart in differing:
        print(f"{chart.picture}: {'differs from its results' if check else 'drawn'}")
        if not check:
            (REPOSITORY / chart.picture).write_text(drawn(chart), encoding="utf-8")
    return 1 if check and differing else 0


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
