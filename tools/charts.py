"""docs/images/steps.svg, the bars of README.md, from the seconds a step in docs/results/steps.md.

python -m tools.charts  # draw it anew
"""

from __future__ import annotations

import re
from html import escape

from .quotes import REPOSITORY, table_below

PICTURE = REPOSITORY / "docs" / "images" / "steps.svg"
RESULTS = REPOSITORY / "docs" / "results" / "steps.md"
_FAMILY, _BEFORE_THE_SECONDS, _FASTER = "Wan 2.1 14B, 720p", "tokens of the longest call", ": times as fast"
_NODE, _NODE_COLOR, _OTHERS_COLOR = "this node, ", "#1f6feb", "#a8b3c2"
_NOTHING, _NOTHING_COLOR = "no attention", "#dfe4ea"
_SHOWN = {"ComfyUI's default": "ComfyUI's default (FlashAttention-2)", "sageattention 2": "SageAttention 2.2"}
_LABELS, _BARS, _VALUES = 250, 430, 60  # widths of the three columns, in pixels
_ROW, _BAR, _TOP, _EDGE = 30, 20, 34, 14


def seconds(page: str) -> dict[str, float]:
    """Attention -> its seconds a step by a page of results, the slowest first."""
    header, *rows = table_below(page, "Seconds a step")
    cells = dict(zip(header, next(row for row in rows if row[0] == _FAMILY), strict=True))
    modes = [name.removesuffix(_FASTER) for name in header if name.endswith(_FASTER)]
    first, last = header.index(_BEFORE_THE_SECONDS) + 1, header.index(_NOTHING) + 1
    seconds = {(_NODE if name in modes else "") + name: float(cells[name].split()[0]) for name in header[first:last]}
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def drawn() -> str:
    """The picture as SVG, with the figures that the results have now."""
    page = RESULTS.read_text(encoding="utf-8")
    bars = seconds(page)
    gpu = re.search(r"NVIDIA (\w+)", page)
    title = f"Seconds per sampling step (less is faster): {_FAMILY}, 81 frames, one {gpu[0] if gpu else 'GPU'}"
    longest = max(bars.values())
    width, height = _LABELS + _BARS + _VALUES + 2 * _EDGE, _TOP + _ROW * len(bars) + _EDGE
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
        color = _NODE_COLOR if is_ours else _NOTHING_COLOR if name == _NOTHING else _OTHERS_COLOR
        length = round(_BARS * value / longest)
        lines += [
            f'<text x="{_EDGE}" y="{baseline}"{weight}>{escape(_SHOWN.get(name, name))}</text>',
            f'<rect x="{_EDGE + _LABELS}" y="{top}" width="{length}" height="{_BAR}" rx="3" fill="{color}"/>',
            f'<text x="{_EDGE + _LABELS + length + 8}" y="{baseline}"{weight}>{value:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
