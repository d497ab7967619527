"""docs/images/steps.svg, the bars of README.md, from a table of docs/results/.

python -m tools.charts  # draw it anew
"""

from __future__ import annotations

from html import escape

from .quotes import REPOSITORY, table_below

PICTURE = REPOSITORY / "docs" / "images" / "steps.svg"
_RESULTS, _HEADING, _COLUMN = "docs/results/comfyui-steps-h100.md", "Peers", "Wan 14B 720p"
_TITLE = "Seconds a sampling step: Wan 2.1 14B, 720p, 81 frames, one NVIDIA H100"
_OURS, _COLORS, _OTHERS = (
    "this node, 8b",
    {"this node, 8b": "#1f6feb", "no attention (mean of V)": "#dfe4ea"},
    "#a8b3c2",
)
_LABELS, _BARS, _VALUES = 210, 430, 60  # widths of the three columns, in pixels
_ROW, _BAR, _TOP, _EDGE = 30, 20, 34, 14


def drawn() -> str:
    """The picture as SVG, with the figures that its results file has now."""
    header, *rows = table_below((REPOSITORY / _RESULTS).read_text(encoding="utf-8"), _HEADING)
    values = [(row[0].strip("*"), row[header.index(_COLUMN)].strip("*")) for row in rows]
    longest = max(float(value) for _, value in values)
    width, height = _LABELS + _BARS + _VALUES + 2 * _EDGE, _TOP + _ROW * len(values) + 2 * _EDGE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="14" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{_EDGE}" y="{_EDGE + 14}" font-weight="bold">{escape(_TITLE)}</text>',
    ]
    for index, (name, value) in enumerate(values):
        top = _EDGE + _TOP + _ROW * index
        baseline = top + _BAR - 5
        weight = ' font-weight="bold"' if name == _OURS else ""
        length = round(_BARS * float(value) / longest)
        lines += [
            f'<text x="{_EDGE}" y="{baseline}"{weight}>{escape(name)}</text>',
            f'<rect x="{_EDGE + _LABELS}" y="{top}" width="{length}" height="{_BAR}" rx="3" '
            f'fill="{_COLORS.get(name, _OTHERS)}"/>',
            f'<text x="{_EDGE + _LABELS + length + 8}" y="{baseline}"{weight}>{escape(value)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
