"""Drawing helpers of the chart: colours, fonts, fitted text."""

from __future__ import annotations

from functools import cache

from PIL import ImageDraw, ImageFont

Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

BACKGROUND: Colour = (24, 26, 31)
PANEL: Colour = (34, 37, 44)
EMPTY: Colour = (47, 51, 60)
TEXT: Colour = (233, 236, 241)
FAINT: Colour = (154, 161, 174)
# Backends in greens and blues, what was left to the host in warm colours: the two can be told apart at a glance.
SERVED: tuple[Colour, ...] = ((64, 192, 140), (70, 150, 230), (140, 205, 95), (120, 120, 240))
LEFT: tuple[Colour, ...] = ((240, 160, 60), (226, 96, 88), (196, 110, 190), (205, 190, 90), (150, 150, 160))


@cache
def font(size: int) -> Font:
    """Pillow's own font, so that the chart looks alike on every machine."""
    return ImageFont.load_default(size)


def fitted(draw: ImageDraw.ImageDraw, text: str, size: int, width: float) -> str:
    """`text`, shortened with an ellipsis to at most `width` pixels."""
    if draw.textlength(text, font=font(size)) <= width:
        return text
    while text and draw.textlength(text + "…", font=font(size)) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrapped(draw: ImageDraw.ImageDraw, text: str, size: int, width: float, lines: int) -> list[str]:
    """`text` broken at spaces into at most `lines` lines of `width` pixels; the last one is shortened to fit."""
    rows: list[str] = []
    rest = text.split()
    while rest and len(rows) < lines - 1:
        count = 1
        while count < len(rest) and draw.textlength(" ".join(rest[: count + 1]), font=font(size)) <= width:
            count += 1
        rows.append(fitted(draw, " ".join(rest[:count]), size, width))
        rest = rest[count:]
    return rows + [fitted(draw, " ".join(rest), size, width)] if rest else rows


def blend(low: Colour, high: Colour, share: float) -> Colour:
    """The colour `share` (0 to 1) of the way from `low` to `high`."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue
