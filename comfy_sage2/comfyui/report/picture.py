"""The report as one picture, twice as wide as high: so the node's preview shows it at half of its size.

From top to bottom: three figures (speed, closeness, who computed most), one bar of the attention's time, its legend,
and the layer that was furthest from full precision. The report's text has everything else.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from ...metrics import average
from ...options import EXACT
from ...text import capitalized, one_line
from ..session.guard import FULL_PRECISION
from ..session.record import Decision, Share, Summary
from ..session.session import Session
from .text import NOT_PATCHED, status
from .verdict import compared_speed, layer_means, sampling_ratio, verdict, worst_cell

Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

WIDTH, HEIGHT, MARGIN = 800, 400, 28
FIGURE, TEXT = 46, 24  # pixels; the preview shows them at half
BAR = 46
LEGEND_ROWS = 3

BACKGROUND, EMPTY = (24, 27, 31), (50, 53, 61)
WHITE, GRAY = (237, 238, 242), (166, 171, 181)
# Colors that lie side by side differ in lightness, or along blue and yellow: most color-blind readers see both.
MODE_COLORS: dict[str, Color] = {
    "8b": (37, 186, 242),
    "4b": (155, 248, 242),
    "precise": (172, 197, 176),
    EXACT: (123, 72, 158),
}
LEFT_COLORS: tuple[Color, ...] = ((211, 163, 41), (230, 211, 92), (162, 64, 25))  # one for each reason
_INNER = WIDTH - 2 * MARGIN
_MOST_CHARACTERS = 2000


class Figure(NamedTuple):
    """A large value, and below it what it is of."""

    value: str
    caption: str


def draw(sessions: list[Session]) -> Image.Image:
    """An RGB picture of WIDTH x HEIGHT pixels of the last node that was at work, or why there is nothing to draw."""
    at_work = [session for session in sessions if session.dispatcher.idle_reason is None]
    if not at_work:
        return _message("Not active", status(sessions[-1]) if sessions else NOT_PATCHED)
    summary = at_work[-1].record.summary()
    if not summary.calls:
        return _message(capitalized(verdict(summary)), at_work[-1].dispatcher.title)
    return _picture(summary)


def figures(summary: Summary) -> tuple[Figure, Figure, Figure]:
    """Speed, closeness to full precision, and who computed most of the attention."""
    return _speed(summary), _closeness(summary), _computed_by(summary)


def _speed(summary: Summary) -> Figure:
    ratio = sampling_ratio(summary)
    if ratio is None:
        return Figure(f"{summary.seconds:.1f} s", "of sampling")
    without = summary.seconds * ratio
    return Figure(compared_speed(ratio), f"{summary.seconds:.1f} s, was {without:.1f} s")


def _closeness(summary: Summary) -> Figure:
    if not summary.agreement:
        return Figure("not known", "closeness")
    cosine = average(layer_means(summary).values()).cosine
    if not math.isfinite(cosine):
        return Figure("NaN", "the output is not finite")
    # Rounded down: 1 would say that nothing differs.
    return Figure(f"{math.floor(cosine * 1e4) / 1e4:.4f}", "cosine, 1 is identical")


def _computed_by(summary: Summary) -> Figure:
    amounts = _amounts(summary)
    largest = max(amounts, key=lambda decision: amounts[decision])
    share = f"{amounts[largest] / (sum(amounts.values()) or 1.0):.0%} of the {'time' if summary.timed else 'calls'}"
    if largest.backend is None:
        return Figure(largest.by or "ComfyUI", share)
    return Figure(largest.backend if largest.is_peer or largest.options is None else largest.options.mode, share)


def _amounts(summary: Summary) -> dict[Decision, float]:
    """Decision -> its seconds, or its calls where nobody timed them."""
    return {share.decision: share.seconds if summary.timed else float(share.calls) for share in summary.shares}


def _picture(summary: Summary) -> Image.Image:
    image, canvas = _blank()
    column = _INNER // 3
    shown = figures(summary)
    fitting = _fitting(canvas, [figure.value for figure in shown], column - TEXT)
    for place, figure in enumerate(shown):
        left = MARGIN + place * column
        _text(canvas, (left, MARGIN + FIGURE - fitting), figure.value, fitting, column - TEXT)
        _text(canvas, (left, MARGIN + FIGURE + 12), figure.caption, TEXT, column - 8, GRAY)
    top = MARGIN + FIGURE + TEXT + 36
    attention = f"Attention: {summary.attention_seconds:.1f} s of the sampling" if summary.timed else "Attention calls"
    _text(canvas, (MARGIN, top), attention, TEXT, _INNER, GRAY)
    colors = _colors(summary.shares)
    _bar(canvas, top + TEXT + 12, [(colors[decision], amount) for decision, amount in _amounts(summary).items()])
    top += TEXT + BAR + 26
    for color, row in _legend(summary, colors):
        canvas.rectangle((MARGIN, top + 3, MARGIN + TEXT - 4, top + TEXT - 1), fill=color)
        _text(canvas, (MARGIN + TEXT + 8, top), row, TEXT, _INNER - TEXT - 8)
        top += TEXT + 10
    _text(canvas, (MARGIN, HEIGHT - MARGIN - TEXT), _worst(summary), TEXT, _INNER, GRAY)
    return image


def _worst(summary: Summary) -> str:
    cell = worst_cell(summary)
    if cell is None:
        return ""
    error = summary.agreement[cell].relative_l1
    return f"Furthest: {summary.layer_name(cell[0])}, step {cell[1] + 1}, relative L1 error {error:.3f}"


def _legend(summary: Summary, colors: dict[Decision, Color]) -> list[tuple[Color, str]]:
    """A row for each decision; rarer ones share the last row."""
    shares = summary.shares
    shown = shares if len(shares) <= LEGEND_ROWS else shares[: LEGEND_ROWS - 1]
    rows = [(colors[share.decision], f"{_calls(share.calls)}: {_label(share)}") for share in shown]
    rest = shares[len(shown) :]
    if rest:
        calls = sum(share.calls for share in rest)
        rows.append((colors[rest[0].decision], f"{_calls(calls)}: {len(rest)} rarer reasons, named in the text"))
    return rows


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


def _label(share: Share) -> str:
    decision = share.decision
    if decision.backend is not None:
        return decision.label
    return f"left to {decision.by or FULL_PRECISION}: {decision.label}"


def _colors(shares: tuple[Share, ...]) -> dict[Decision, Color]:
    """The color of a mode is the same in every picture; each reason to leave calls has its own."""
    left = [share.decision for share in shares if share.decision.backend is None]
    colors = {decision: LEFT_COLORS[min(place, len(LEFT_COLORS) - 1)] for place, decision in enumerate(left)}
    for share in shares:
        options = share.decision.options
        if options is not None:
            colors[share.decision] = MODE_COLORS[options.mode]
    return colors


def _message(title: str, text: str) -> Image.Image:
    image, canvas = _blank()
    top = MARGIN
    for paragraph, size, color, most in ((title, TEXT + 8, WHITE, 3), (text, TEXT, GRAY, 7)):
        for line in _wrapped(canvas, paragraph, size, most):
            _text(canvas, (MARGIN, top), line, size, _INNER, color)
            top += round(1.4 * size)
        top += TEXT // 2
    return image


def _blank() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (WIDTH, HEIGHT), BACKGROUND)
    return image, ImageDraw.Draw(image)


def _bar(canvas: ImageDraw.ImageDraw, top: int, parts: list[tuple[Color, float]]) -> None:
    """A bar over the whole width, divided as `parts` are, with the larger shares in percent."""
    whole = sum(amount for _, amount in parts)
    left = float(MARGIN)
    canvas.rectangle((left, top, left + _INNER, top + BAR), fill=EMPTY)
    for color, amount in parts:
        share = amount / whole if whole else 0.0
        right = left + _INNER * share
        canvas.rectangle((left, top, right, top + BAR), fill=color)
        if right - left > 3 * TEXT:
            ink = BACKGROUND if sum(color) > 360 else WHITE
            canvas.text(((left + right) / 2, top + BAR / 2), f"{share:.0%}", fill=ink, font=_font(TEXT), anchor="mm")
        left = right


@cache
def _font(size: int) -> Font:
    """Pillow's own font, so that the picture looks alike on every machine."""
    return ImageFont.load_default(size)


def _fitting(canvas: ImageDraw.ImageDraw, texts: list[str], width: float) -> int:
    """The largest size from TEXT to FIGURE in which each of `texts` is at most `width` pixels long, else TEXT."""
    sizes = range(FIGURE, TEXT, -1)
    fit = (size for size in sizes if all(canvas.textlength(text, font=_font(size)) <= width for text in texts))
    return next(fit, TEXT)


def _text(
    canvas: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int, width: float, color: Color = WHITE
) -> None:
    """One line from `place` on, shortened with an ellipsis to `width` pixels."""
    text = one_line(text[:_MOST_CHARACTERS])
    if canvas.textlength(text, font=_font(size)) > width:
        while text and canvas.textlength(f"{text}…", font=_font(size)) > width:
            text = text[: -max(len(text) // 16, 1)]
        text = f"{text.rstrip()}…"
    canvas.text(place, text, fill=color, font=_font(size))


def _wrapped(canvas: ImageDraw.ImageDraw, text: str, size: int, most: int) -> list[str]:
    """`text` broken at spaces into at most `most` lines; the last one holds the rest."""
    lines: list[str] = []
    for word in one_line(" ".join(text[:_MOST_CHARACTERS].split())).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and (len(lines) == most or canvas.textlength(longer, font=_font(size)) <= _INNER):
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
