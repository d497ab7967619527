"""Draw docs/images/steps.svg, the bar chart of README.md, from the seconds per step in docs/results/steps.md.

python -m tools.charts
"""

from __future__ import annotations

import argparse
import re
from html import escape

from .quotes import REPOSITORY, table_below

PICTURE = REPOSITORY / "docs" / "images" / "steps.svg"
RESULTS = REPOSITORY / "docs" / "results" / "steps.md"
_FAMILY, _COLUMN_BEFORE_SECONDS, _SPEEDUP = "Wan 2.1 14B, 720p", "tokens of the longest call", ": times as fast"
_NODE, _NODE_COLOR, _OTHERS_COLOR = "this node, ", "#1f6feb", "#a8b3c2"
_NO_ATTENTION, _NO_ATTENTION_COLOR = "no attention", "#dfe4ea"
_LABELS = {
    "ComfyUI's default": "ComfyUI's default (FlashAttention-2)",
    "SageAttention 2 per thread": "SageAttention 2.2, per thread",
    "SageAttention 2 per warp": "SageAttention 2.2, per warp",
    "cuDNN": "torch's cuDNN attention",
}
_LABEL_WIDTH, _BAR_WIDTH, _VALUE_WIDTH = 250, 430, 60  # widths of the three columns, in pixels
_ROW, _BAR, _TOP, _EDGE = 30, 20, 34, 14


def seconds(page: str) -> tuple[str, dict[str, float]]:
    """The layers that were timed, and attention -> its seconds per step on a page of results, slowest first."""
    header, *rows = table_below(page, "Seconds a step")
    cells = dict(zip(header, next(row for row in rows if row[0] == _FAMILY), strict=True))
    modes = [name.removesuffix(_SPEEDUP) for name in header if name.endswith(_SPEEDUP)]
    first, last = header.index(_COLUMN_BEFORE_SECONDS) + 1, header.index(_NO_ATTENTION) + 1
    seconds = {(_NODE if name in modes else "") + name: float(cells[name].split()[0]) for name in header[first:last]}
    return cells["layers"], dict(sorted(seconds.items(), key=lambda item: -item[1]))


def drawn() -> str:
    """The chart as SVG, with the current figures of the results."""
    page = RESULTS.read_text(encoding="utf-8")
    layers, bars = seconds(page)
    gpu = re.search(r"NVIDIA (\w+)", page)
    title = f"Seconds per step, {layers} layers (less is faster): {_FAMILY}, 81 frames, {gpu[0] if gpu else 'GPU'}"
    longest = max(bars.values())
    width, height = _LABEL_WIDTH + _BAR_WIDTH + _VALUE_WIDTH + 2 * _EDGE, _TOP + _ROW * len(bars) + _EDGE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="14" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{_EDGE}" y="{_EDGE + 14}" font-weight="bold">{escape(title)}</text>',
    ]
    for index, (name, value) in enumerate(bars.items()):
        top = _EDGE + _TOP + _ROW * index
        baseline = top + _BAR - 5
        is_ours = name.startswith(_NODE)
        weight = ' font-weight="bold"' if is_ours else ""
        color = _NODE_COLOR if is_ours else _NO_ATTENTION_COLOR if name == _NO_ATTENTION else _OTHERS_COLOR
        length = round(_BAR_WIDTH * value / longest)
        lines += [
            f'<text x="{_EDGE}" y="{baseline}"{weight}>{escape(_LABELS.get(name, name))}</text>',
            f'<rect x="{_EDGE + _LABEL_WIDTH}" y="{top}" width="{length}" height="{_BAR}" rx="3" fill="{color}"/>',
            f'<text x="{_EDGE + _LABEL_WIDTH + length + 8}" y="{baseline}"{weight}>{value:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PICTURE.write_text(drawn(), encoding="utf-8")
