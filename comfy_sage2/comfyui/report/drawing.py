"""Drawing helpers of the chart: colors, fonts, fitted text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from PIL import ImageDraw, ImageFont

from ...text import one_line

Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

MOST_CHARACTERS = 2000  # of a text; some seven lines of the chart hold as many

BACKGROUND: Color = (24, 26, 31)
PANEL: Color = (34, 37, 44)
EMPTY: Color = (47, 51, 60)
TEXT: Color = (233, 236, 241)
FAINT: Color = (154, 161, 174)
# Backends in greens and blues, what was left to ComfyUI in warm colors: the two can be told apart at a glance.
SERVED: tuple[Color, ...] = (
    (64, 192, 140),
    (70, 150, 230),
    (140, 205, 95),
    (120, 120, 240),
    (60, 200, 210),
    (160, 220, 170),
    (90, 110, 190),
)
LEFT: tuple[Color, ...] = ((240, 160, 60), (226, 96, 88), (196, 110, 190), (205, 190, 90), (150, 150, 160))


@cache
def font(size: int) -> Font:
    """Pillow's own font, so that the chart looks alike on every machine."""
    return ImageFont.load_default(size)


def fitted(draw: ImageDraw.ImageDraw, text: str, size: int, width: float) -> str:
    """`text`, shortened with an ellipsis to at most `width` pixels."""
    text = one_line(text[:MOST_CHARACTERS])
    if draw.textlength(text, font=font(size)) <= width:
        return text
    count = _longest(len(text), lambda count: draw.textlength(text[:count] + "…", font=font(size)) <= width)
    return text[:count].rstrip() + "…"


def wrapped(draw: ImageDraw.ImageDraw, text: str, size: int, width: float, lines: int) -> list[str]:
    """`text` broken at spaces into at most `lines` lines of `width` pixels; the last one is shortened to fit."""
    rows: list[str] = []
    rest = text[:MOST_CHARACTERS].split()

    def fits(count: int) -> bool:
        return draw.textlength(" ".join(rest[:count]), font=font(size)) <= width

    while rest and len(rows) < lines - 1:
        count = max(_longest(len(rest), fits), 1)
        rows.append(fitted(draw, " ".join(rest[:count]), size, width))
        rest = rest[count:]
    return rows + [fitted(draw, " ".join(rest), size, width)] if rest else rows


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to `most` that fits, where smaller ones fit too: found by halving."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def blend(low: Color, high: Color, share: float) -> Color:
    """The color `share` (0 to 1) of the way from `low` to `high`."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue
