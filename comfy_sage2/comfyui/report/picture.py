"""The report as a card, twice as wide as high, so that the node's preview shows it at half of its size; and as a chart.

From top to bottom: three figures (speed, closeness, who computed most), a bar of the attention's time if several
computed it, its legend, and the layer that was furthest from full precision. The chart is the card with a map of the
errors of each layer and step below it. The report's text has everything else.
"""

from __future__ import annotations

import math
import textwrap
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...backends.reference import ReferenceBackend
from ...options import EXACT
from ...text import capitalized, one_line
from ..session.record import Decision, Share, Summary
from ..session.session import Session
from .text import NOT_PATCHED, is_earlier, status
from .verdict import (
    LITTLE,
    closeness,
    compared_speed,
    computed_by,
    largest,
    mean_cosine,
    quantized_mode,
    sampling_ratio,
    verdict,
    worst_cell,
)

Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

WIDTH, HEIGHT, MARGIN = 800, 400, 28
FIGURE, TEXT = 46, 24  # pixels; the preview shows them at half
BAR = 46
LEGEND_ROWS = 3

BACKGROUND, EMPTY = (24, 27, 31), (50, 53, 61)
WHITE, GRAY, GREEN, AMBER = (237, 238, 242), (166, 171, 181), (94, 201, 120), (240, 168, 60)
# Colors that lie side by side differ in lightness, or along blue and yellow: most color-blind readers see that.
MODE_COLORS: dict[str, Color] = {
    "8b": (37, 186, 242),
    "4b": (155, 248, 242),
    "precise": (172, 197, 176),
    EXACT: (123, 72, 158),
}
LEFT_COLORS: tuple[Color, ...] = ((211, 163, 41), (230, 211, 92), (162, 64, 25))  # one for each reason
# Relative L1 errors of the modes on Gaussian data (docs/results/attention-h200.md and reference-numerics.md), and the
# color of an error by its ratio to that of its mode.
USUAL_ERRORS = {"precise": 0.011, "8b": 0.038, "4b": 0.164}
ERROR_COLORS: dict[float, Color] = {0.0: (34, 58, 94), 1.0: (37, 186, 242), 2.0: (230, 211, 92), 4.0: (214, 74, 44)}
MAP_HEIGHT = 320  # pixels at most
_INNER = WIDTH - 2 * MARGIN
_MAX_CHARACTERS = 2000


class Figure(NamedTuple):
    """A large value, and a caption below it that says what it is."""

    value: str
    caption: str
    color: Color = WHITE


def draw(sessions: list[Session], run: str | None = None) -> tuple[Image.Image, Image.Image]:
    """Card and chart in RGB of the last active node, or a card that says why there is nothing to draw.

    The chart equals the card if closeness was not measured. run: the run of ComfyUI's queue that asks.
    """
    active = [session for session in sessions if session.dispatcher.idle_reason is None]
    if not active:
        card = _message("Not active", status(sessions[-1]) if sessions else NOT_PATCHED)
        return card, card
    summary = active[-1].record.summary()
    if not summary.calls:
        card = _message(capitalized(verdict(summary)), active[-1].dispatcher.title)
        return card, card
    card = _card(summary, is_earlier=is_earlier(active, run))
    mode = next(filter(None, (quantized_mode(share.decision) for share in summary.shares)), None)
    return card, card if mode is None or not summary.agreement else _with_maps(card, summary, mode)


def figures(summary: Summary) -> tuple[Figure, Figure, Figure]:
    return _speed(summary), _closeness(summary), _computed_by(summary)


def _speed(summary: Summary) -> Figure:
    ratio = sampling_ratio(summary)
    if ratio is None:
        return Figure(f"{summary.seconds:.1f} s", "of sampling")
    color = WHITE if abs(ratio - 1.0) < LITTLE else GREEN if ratio > 1.0 else AMBER
    return Figure(compared_speed(ratio), f"{summary.seconds:.1f} s, was {summary.seconds * ratio:.1f} s", color)


def _closeness(summary: Summary) -> Figure:
    cosine = mean_cosine(summary)
    if cosine is None:
        return Figure("?", "closeness not known", GRAY)
    if math.isnan(cosine):
        return Figure("NaN", "the output is not finite", AMBER)
    return Figure(closeness(cosine).removesuffix(" to").removesuffix(" from"), f"{cosine:.4f}, 1 is identical")


def _computed_by(summary: Summary) -> Figure:
    amounts = _amounts(summary)
    decision = largest(summary, summary.shares).decision
    share = f"{amounts[decision] / (sum(amounts.values()) or 1.0):.0%} of the {'time' if summary.timed else 'calls'}"
    if decision.backend == ReferenceBackend.name:
        return Figure(str(quantized_mode(decision)), "by the slow reference", AMBER)
    return Figure(quantized_mode(decision) or decision.backend or decision.by or "ComfyUI", share)


def _amounts(summary: Summary) -> dict[Decision, float]:
    """Decision -> its seconds, or its calls if they were not timed."""
    return {share.decision: share.seconds if summary.timed else float(share.calls) for share in summary.shares}


def _card(summary: Summary, *, is_earlier: bool) -> Image.Image:
    image, canvas = _blank()
    column = _INNER // 3
    shown = figures(summary)
    fitting = _fitting(canvas, [figure.value for figure in shown], column - TEXT)
    for place, figure in enumerate(shown):
        left = MARGIN + place * column
        _text(canvas, (left, MARGIN + FIGURE - fitting), figure.value, fitting, column - TEXT, figure.color)
        _text(canvas, (left, MARGIN + FIGURE + 12), figure.caption, TEXT, column - 8, GRAY)
    top = MARGIN + FIGURE + TEXT + 36
    seconds = min(summary.attention_seconds, summary.seconds)
    attention = f"Attention: {seconds:.1f} s of {summary.seconds:.1f} s" if summary.timed else "Calls"
    _text(canvas, (MARGIN, top), attention, TEXT, _INNER, GRAY)
    colors = _colors(summary.shares)
    top += TEXT + 12
    if len(summary.shares) > 1:
        _bar(canvas, top, [(colors[decision], amount) for decision, amount in _amounts(summary).items()])
        top += BAR + 14
    for color, row in _legend(summary, colors):
        canvas.rectangle((MARGIN, top + 3, MARGIN + TEXT - 4, top + TEXT - 1), fill=color)
        _text(canvas, (MARGIN + TEXT + 8, top), row, TEXT, _INNER - TEXT - 8)
        top += TEXT + 10
    last, color = ("From an earlier run", AMBER) if is_earlier else (_worst(summary), GRAY)
    _text(canvas, (MARGIN, HEIGHT - MARGIN - TEXT), last, TEXT, _INNER, color)
    return image


def _with_maps(card: Image.Image, summary: Summary, mode: str) -> Image.Image:
    """The card, and below it the errors of each layer (down) and step (across): of self- and of cross-attention."""
    usual = USUAL_ERRORS[mode]
    errors = np.full((summary.layers, summary.steps), np.nan)
    for cell, agreement in summary.agreement.items():
        errors[cell] = agreement.relative_l1 if math.isfinite(agreement.relative_l1) else math.inf
    rows: dict[str, list[int]] = {}
    for layer in range(summary.layers):
        words = summary.layer_name(layer).split()
        kind = next((f"{word.capitalize()}-attention" for word in ("self", "cross") if word in words), "Attention")
        rows.setdefault(kind, []).append(layer)
    width = (_INNER - MARGIN * (len(rows) - 1)) // len(rows)
    height = max(min(MAP_HEIGHT, 12 * max(map(len, rows.values()))), 4 * TEXT)
    image = Image.new("RGB", (WIDTH, HEIGHT + height + 4 * TEXT + MARGIN), BACKGROUND)
    image.paste(card)
    canvas = ImageDraw.Draw(image)
    for place, (kind, layers) in enumerate(rows.items()):
        left = MARGIN + place * (width + MARGIN)
        _text(canvas, (left, HEIGHT), f"{kind}: layers down, steps across", TEXT - 6, width, GRAY)
        cells = Image.fromarray(_error_colors(errors[layers] / usual))
        image.paste(cells.resize((width, height), Image.Resampling.NEAREST), (left, HEIGHT + TEXT + 12))
    top = HEIGHT + TEXT + height + 30
    scale = np.linspace(0.0, max(ERROR_COLORS), _INNER // 2)[None]
    image.paste(Image.fromarray(_error_colors(scale)).resize((_INNER // 2, TEXT)), (MARGIN, top))
    tick = MARGIN + round(_INNER // 2 / max(ERROR_COLORS))
    canvas.line((tick, top, tick, top + TEXT), WHITE, 3)
    legend = f"0 to {max(ERROR_COLORS) * usual:.2g}; {usual:.2g} is usual in {mode}"
    _text(canvas, (MARGIN + _INNER // 2 + 16, top), legend, TEXT, _INNER // 2 - 16, GRAY)
    return image


def _error_colors(shares: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The colors (…, 3) of errors, given as multiples of the usual error. NaN means not measured."""
    stops, colors = list(ERROR_COLORS), np.array(list(ERROR_COLORS.values()), dtype=np.float64)
    channels = [np.interp(shares, stops, colors[:, channel]) for channel in range(3)]
    pixels = np.where(np.isnan(shares)[..., None], EMPTY, np.stack(channels, axis=-1))
    return pixels.astype(np.uint8)


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
    rows = []
    for decision, calls in ((share.decision, share.calls) for share in shown):
        whom = computed_by(decision) if quantized_mode(decision) is None else f"by {decision.label}"
        whom += f": {decision.label}" if decision.backend is None else ""
        rows.append((colors[decision], f"{_calls(calls)} {whom}"))
    rest = shares[len(shown) :]
    if rest:
        calls = sum(share.calls for share in rest)
        rows.append((colors[rest[0].decision], f"{_calls(calls)} for {len(rest)} rarer reasons, named in the text"))
    return rows


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


def _colors(shares: tuple[Share, ...]) -> dict[Decision, Color]:
    """The color of a mode is the same in every picture; each reason to leave calls has its own."""
    left = [share.decision for share in shares if share.decision.backend is None]
    colors = {decision: LEFT_COLORS[min(place, len(LEFT_COLORS) - 1)] for place, decision in enumerate(left)}
    for share in shares:
        options = share.decision.options
        if options is not None:
            colors[share.decision] = MODE_COLORS[options.mode]
    return colors


def _message(title: str, explanation: str) -> Image.Image:
    image, canvas = _blank()
    top = MARGIN
    for paragraph, size, color, most in ((title, TEXT + 8, WHITE, 3), (explanation, TEXT, GRAY, 7)):
        text = one_line(" ".join(paragraph[:_MAX_CHARACTERS].split()))
        for line in textwrap.wrap(text, 1400 // size, max_lines=most, placeholder=" …"):  # characters of average width
            _text(canvas, (MARGIN, top), line, size, _INNER, color)
            top += round(1.4 * size)
        top += TEXT // 2
    return image


def _blank() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (WIDTH, HEIGHT), BACKGROUND)
    return image, ImageDraw.Draw(image)


def _bar(canvas: ImageDraw.ImageDraw, top: int, parts: list[tuple[Color, float]]) -> None:
    """A bar over the whole width, divided in proportion to `parts`; the larger parts show their percentage."""
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
    text = one_line(text[:_MAX_CHARACTERS])
    if canvas.textlength(text, font=_font(size)) > width:
        while text and canvas.textlength(f"{text}…", font=_font(size)) > width:
            text = text[: -max(len(text) // 16, 1)]
        text = f"{text.rstrip()}…"
    canvas.text(place, text, fill=color, font=_font(size))
