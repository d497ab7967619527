"""Drawing from top to bottom: text that fits, bars, legends, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from ...text import one_line
from .colors import BACKGROUND, EMPTY, FAINT, TEXT, Color

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

MOST_CHARACTERS = 2000  # of a text; some seven lines of the chart hold as many
TALLEST = 4000  # pixels; nothing that is drawn here comes near


@cache
def font(size: int) -> Font:
    """Pillow's own font, so that the chart looks alike on every machine."""
    return ImageFont.load_default(size)


class Sheet:
    """A picture that is drawn from top to bottom; `top` is where the next part begins."""

    def __init__(self, width: int, margin: int) -> None:
        self.width, self.margin, self.top = width, margin, margin
        self.inner = width - 2 * margin
        self._image = Image.new("RGB", (width, TALLEST), BACKGROUND)
        self.draw = ImageDraw.Draw(self._image)

    def finished(self) -> Image.Image:
        """The picture, as high as what was drawn."""
        return self._image.crop((0, 0, self.width, self.top + self.margin))

    def text(self, x: float, y: float, text: str, size: int, color: Color = TEXT, anchor: str = "la") -> None:
        """Text at a place of the caller's choice."""
        self.draw.text((x, y), text, fill=color, font=font(size), anchor=anchor)

    def paragraph(self, text: str, size: int, color: Color = TEXT, lines: int = 1) -> None:
        """Text in at most so many lines, and a gap behind it."""
        for line in wrapped(self.draw, text, size, self.inner, lines):
            self.text(self.margin, self.top, line, size, color)
            self.top += round(1.4 * size)
        self.top += size // 3

    def bar(self, parts: Iterable[tuple[Color, float]], height: int, size: int) -> None:
        """A bar over the whole width, divided as `parts` are, with the larger shares in percent."""
        parts = list(parts)
        whole = sum(amount for _, amount in parts)
        left, bottom = float(self.margin), self.top + height
        self.draw.rectangle((left, self.top, left + self.inner, bottom), fill=EMPTY)
        for color, amount in parts:
            width = self.inner * (amount / whole if whole else 0.0)
            self.draw.rectangle((left, self.top, left + width, bottom), fill=color)
            if width > 2.5 * size:
                ink = BACKGROUND if sum(color) > 320 else TEXT
                self.text(left + width / 2, self.top + height / 2, f"{amount / whole:.0%}", size, ink, "mm")
            left += width
        self.top = bottom + height // 2

    def legend(self, rows: Iterable[tuple[Color, str]], size: int) -> None:
        """A colored square and a line of text each."""
        for color, text in rows:
            self.draw.rectangle((self.margin, self.top + 2, self.margin + size, self.top + 2 + size), fill=color)
            left = self.margin + round(1.6 * size)
            self.text(left, self.top, fitted(self.draw, text, size, self.width - self.margin - left), size)
            self.top += round(1.6 * size)
        self.top += size // 2

    def paste(self, image: Image.Image, left: int) -> None:
        """A picture at the present height, which stays as it is."""
        self._image.paste(image, (left, self.top))

    def frame(self, box: tuple[int, int, int, int]) -> None:
        """A frame around `box` that shows on every color."""
        for distance, color in ((3, BACKGROUND), (2, TEXT), (1, TEXT), (0, BACKGROUND)):
            left, top, right, bottom = box
            self.draw.rectangle(
                (left - distance, top - distance, right - 1 + distance, bottom - 1 + distance), outline=color
            )

    def captions(self, left: str, right: str, size: int) -> None:
        """Two lines of small text at both ends of the width: the right one as a whole, the left one where it fits."""
        width = self.draw.textlength(right, font=font(size)) + size
        self.text(self.margin, self.top, fitted(self.draw, left, size, self.inner - width), size, FAINT)
        self.text(self.width - self.margin, self.top, right, size, FAINT, "ra")
        self.top += round(1.5 * size)


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
    rest = one_line(" ".join(text[:MOST_CHARACTERS].split())).split()

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
