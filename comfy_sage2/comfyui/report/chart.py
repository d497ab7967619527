"""The record of a sampling as a picture: shares of calls and time, and a map of layers and steps."""

from __future__ import annotations

import math

from PIL import Image, ImageDraw

from ...options import EXACT, AttentionOptions
from ..serve.session import Session
from .drawing import BACKGROUND, EMPTY, FAINT, LEFT, PANEL, SERVED, TEXT, Color, blend, fitted, font, wrapped
from .record import Outcome, Share, Summary
from .text import NOT_PATCHED, headline, status, time_lines

WIDTH = 1200
MARGIN = 36
TITLE_SIZE, HEADING_SIZE, TEXT_SIZE, SMALL_SIZE = 30, 20, 18, 15
BAR_HEIGHT = 34
MAP_HEIGHT = 340  # at most; a model of few layers gets rows of ROW_HEIGHT
ROW_HEIGHT = 40
NOTE_HEIGHT = 26
MOST_ROWS = 7  # of the legend; rarer outcomes are summed in its last row
# (mode, smooth_v) as in SERVED: all else is the same in all calls of a node.
COLORED = (("8b", False), ("4b", False), ("4b", True), ("8b", True), ("precise", False))
LOW_ERROR: Color = (64, 192, 140)
HIGH_ERROR: Color = (226, 96, 88)
# Relative L1 that is drawn in the strongest color unless a larger one was measured.
ERROR_SCALE = 0.1


def draw_chart(sessions: list[Session]) -> Image.Image:
    """An RGB picture, 1200 pixels wide, about the last node that was at work, or a card that says why there is none."""
    at_work = [session for session in sessions if session.task.idle_reason is None]
    if not at_work:
        return _card(status(sessions[-1]) if sessions else NOT_PATCHED)
    task, summary = at_work[-1].task, at_work[-1].record.summary()
    own = task.own_headline(summary)
    if own is not None:
        return _card(own)
    subtitle = f"{task.title}  ·  {headline(summary)}"
    if not summary.calls:
        return _card(subtitle)
    return _Chart(summary, subtitle, [*task.reasoning(summary), *time_lines(summary)]).image


def _card(text: str) -> Image.Image:
    """A picture with a title and a message only."""
    image = Image.new("RGB", (WIDTH, 260), BACKGROUND)
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, MARGIN - 6), "SageAttention2", fill=TEXT, font=font(TITLE_SIZE))
    for row, line in enumerate(wrapped(draw, text, TEXT_SIZE, WIDTH - 2 * MARGIN, 6)):
        draw.text((MARGIN, MARGIN + 50 + row * 26), line, fill=FAINT, font=font(TEXT_SIZE))
    return image


class _Chart:
    """Draws one summary from top to bottom; `top` is where the next part begins."""

    def __init__(self, summary: Summary, subtitle: str, notes: list[str]) -> None:
        self.summary = summary
        measuring = ImageDraw.Draw(Image.new("RGB", (1, 1)))
        self.notes = [line for note in notes for line in wrapped(measuring, note, TEXT_SIZE, WIDTH - 2 * MARGIN, 3)]
        self.rows = self._legend_rows()
        self.colors = _colors(summary.shares)
        self.map_height = min(MAP_HEIGHT, ROW_HEIGHT * summary.layers)
        maps = 2 if summary.agreement else 1
        height = 130 + 3 * (BAR_HEIGHT + 44) + len(self.rows) * 30 + maps * (self.map_height + 84) + MARGIN
        height += len(self.notes) * NOTE_HEIGHT
        self.image = Image.new("RGB", (WIDTH, height), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.top = MARGIN - 6
        self._title(subtitle)
        colors = self.colors
        self._bar("Attention calls", [(colors[share.outcome], float(share.calls)) for share in summary.shares])
        self._bar("Attention time", [(colors[share.outcome], share.seconds) for share in summary.shares])
        rest = max(summary.seconds - summary.attention_seconds, 0.0)
        self._bar("Sampling: attention and the rest", [(TEXT, summary.attention_seconds), (FAINT, rest)])
        self._legend()
        self._notes()
        self._map(
            "What served each layer and step",
            {place: self.colors[outcome] for place, outcome in summary.cells.items()},
        )
        if summary.agreement:
            self._error_map()

    def _text(self, x: float, y: float, text: str, size: int, color: Color = TEXT, anchor: str = "la") -> None:
        self.draw.text((x, y), text, fill=color, font=font(size), anchor=anchor)

    def _title(self, subtitle: str) -> None:
        self._text(MARGIN, self.top, "SageAttention2", TITLE_SIZE)
        self._text(MARGIN, self.top + 44, fitted(self.draw, subtitle, TEXT_SIZE, WIDTH - 2 * MARGIN), TEXT_SIZE, FAINT)
        self.top += 96

    def _bar(self, heading: str, parts: list[tuple[Color, float]]) -> None:
        """A bar over the whole width, divided as `parts` are."""
        self._text(MARGIN, self.top, heading, HEADING_SIZE)
        top, whole = self.top + 32, sum(size for _, size in parts)
        left = float(MARGIN)
        self.draw.rectangle((MARGIN, top, WIDTH - MARGIN, top + BAR_HEIGHT), fill=EMPTY)
        for color, size in parts:
            width = (WIDTH - 2 * MARGIN) * (size / whole if whole else 0.0)
            self.draw.rectangle((left, top, left + width, top + BAR_HEIGHT), fill=color)
            if width > 60:
                self._text(left + width / 2, top + BAR_HEIGHT / 2, f"{size / whole:.0%}", TEXT_SIZE, BACKGROUND, "mm")
            left += width
        self.top = top + BAR_HEIGHT + 12

    def _legend_rows(self) -> list[tuple[Outcome, str]]:
        shares = self.summary.shares
        shown = shares if len(shares) <= MOST_ROWS else shares[: MOST_ROWS - 1]
        rows = [
            (share.outcome, f"{share.calls} calls, {share.seconds:.2f} s   {share.outcome.label}") for share in shown
        ]
        rest = shares[len(shown) :]
        if rest:
            rows.append(
                (
                    rest[0].outcome,
                    f"{sum(share.calls for share in rest)} calls   {len(rest)} rarer reasons, named in the text",
                )
            )
        return rows

    def _legend(self) -> None:
        self.top += 8
        for outcome, text in self.rows:
            self.draw.rectangle((MARGIN, self.top + 3, MARGIN + 16, self.top + 19), fill=self.colors[outcome])
            self._text(MARGIN + 28, self.top, fitted(self.draw, text, TEXT_SIZE, WIDTH - 2 * MARGIN - 28), TEXT_SIZE)
            self.top += 30
        self.top += 16

    def _notes(self) -> None:
        for line in self.notes:
            self._text(MARGIN, self.top, line, TEXT_SIZE, FAINT)
            self.top += NOTE_HEIGHT
        self.top += 12

    def _map(self, heading: str, colors: dict[tuple[int, int], Color]) -> None:
        """Layers from top to bottom, steps from left to right, one colored cell each."""
        self._text(MARGIN, self.top, heading, HEADING_SIZE)
        left, top = MARGIN + 62, self.top + 34
        width, height = WIDTH - MARGIN - left, self.map_height
        self.draw.rectangle((left, top, left + width, top + height), fill=PANEL)
        cell_width, cell_height = width / self.summary.steps, height / max(self.summary.layers, 1)
        # A gap between the cells while they are large enough to show one.
        gap = 1 if min(cell_width, cell_height) >= 5 else 0
        for (layer, step), color in colors.items():
            x, y = left + step * cell_width, top + layer * cell_height
            self.draw.rectangle((x, y, max(x + cell_width - 1 - gap, x), max(y + cell_height - 1 - gap, y)), fill=color)
        for number, place in _ticks(self.summary.layers, top, cell_height):
            self._text(left - 10, place, str(number), SMALL_SIZE, FAINT, "rm")
        for number, place in _ticks(self.summary.steps, left, cell_width):
            self._text(place, top + height + 6, str(number), SMALL_SIZE, FAINT, "ma")
        self._text(MARGIN, top - 2, "layer", SMALL_SIZE, FAINT)
        self._text(WIDTH - MARGIN, top + height + 24, "step", SMALL_SIZE, FAINT, "ra")
        self.top = top + height + 50

    def _error_map(self) -> None:
        errors = {place: found.relative_l1 for place, found in self.summary.agreement.items()}
        scale = max([ERROR_SCALE, *filter(math.isfinite, errors.values())])
        # NaN and infinity take the strongest color.
        shares = {place: error / scale if math.isfinite(error) else 1.0 for place, error in errors.items()}
        colors = {place: blend(LOW_ERROR, HIGH_ERROR, share) for place, share in shares.items()}
        self._map(f"Relative L1 against full precision (green 0, red {scale:.2g})", colors)


def _colors(shares: tuple[Share, ...]) -> dict[Outcome, Color]:
    """A color for every outcome: that of its mode, the same in every chart, or one for each reason."""
    outcomes = [share.outcome for share in shares]
    left = [outcome for outcome in outcomes if outcome.backend is None]
    served = [outcome for outcome in outcomes if outcome.backend is not None]
    colors = {outcome: _color(outcome.options) for outcome in served}
    colors.update({outcome: LEFT[min(index, len(LEFT) - 1)] for index, outcome in enumerate(left)})
    return colors


def _color(options: AttentionOptions | None) -> Color:
    assert options is not None  # a backend has options
    return SERVED[-1] if options.mode == EXACT else SERVED[COLORED.index((options.mode, options.smooth_v))]


def _ticks(count: int, start: float, pitch: float) -> list[tuple[int, float]]:
    """At most eleven of the numbers 0 .. count - 1, evenly, with the pixel of each cell's middle."""
    stride = max(1, -(-count // 10))
    return [(number, start + (number + 0.5) * pitch) for number in range(0, count, stride)]
