"""The record of a sampling as pictures: a card for the node, readable at 400 pixels, and a chart with all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from PIL import Image

from ...options import EXACT
from ...text import capitalized
from ..session.guard import FULL_PRECISION
from ..session.record import Decision, LayerStep, Share, Summary
from ..session.session import Session
from . import heatmap
from .colors import BROKEN, FAINT, LEFT, SERVED, TEXT, Color
from .drawing import Sheet
from .text import NOT_PATCHED, base_of, first_line, headline, status, time_lines, took
from .verdict import worst_cell

# By mode and smooth_v: all else is the same in all calls of a node.
_COLORED = (("8b", False), ("4b", False), ("4b", True), ("8b", True), ("precise", False), (EXACT, False))
MODE_COLORS = dict(zip(_COLORED, SERVED, strict=True))


@dataclass(frozen=True)
class Style:
    """Sizes in pixels. A node of 400 pixels shows the card at half of them.

    Attributes:
        legend_rows: rarer decisions are summed in the last one.
        map_height: at most; a model of few layers gets rows of `row_height`.
    """

    width: int
    margin: int
    headline: int
    text: int
    small: int
    bar_height: int
    legend_rows: int
    map_height: int
    row_height: int


CARD = Style(800, 24, 36, 28, 26, 52, 4, 260, 40)
CHART = Style(1200, 36, 44, 20, 16, 34, 7, 600, 36)


def draw_card(sessions: list[Session]) -> Image.Image:
    """An RGB picture for the report node, of the last node that was at work: the decision, the shares, one map."""
    return _drawn(sessions, CARD, _card)


def draw_chart(sessions: list[Session]) -> Image.Image:
    """An RGB picture, 1200 pixels wide, with all there is to see of the last node that was at work."""
    return _drawn(sessions, CHART, _chart)


def _drawn(sessions: list[Session], style: Style, draw: Callable[[_Drawing], None]) -> Image.Image:
    """What `draw` makes of the last session at work, or a message where there is nothing to draw."""
    at_work = [session for session in sessions if session.handler.idle_reason is None]
    if not at_work:
        return _message("Not active", status(sessions[-1]) if sessions else NOT_PATCHED)
    session = at_work[-1]
    summary = session.record.summary()
    if session.handler.own_headline(summary) is not None or not summary.calls:
        return _message(first_line(session, summary), session.handler.title)
    drawing = _Drawing(session, summary, style)
    draw(drawing)
    return drawing.sheet.finished()


def _card(drawing: _Drawing) -> None:
    summary = drawing.summary
    drawing.head(4)
    drawing.shares("")
    if summary.agreement:
        drawing.errors()
    elif all(share.decision.backend is None for share in summary.shares):
        drawing.sheet.paragraph(f"Why: {summary.shares[0].decision.label}", CARD.text, FAINT, 5)
    else:
        drawing.served()


def _chart(drawing: _Drawing) -> None:
    summary = drawing.summary
    drawing.head(3)
    drawing.shares("Attention calls")
    if summary.timed:
        drawing.times()
    for note in (*drawing.session.handler.reasoning(summary), *time_lines(summary, base_of(drawing.session))):
        drawing.sheet.paragraph(note, CHART.text, FAINT, 3)
    drawing.served()
    if summary.agreement:
        drawing.errors()


def _message(title: str, text: str) -> Image.Image:
    sheet = Sheet(CARD.width, CARD.margin)
    sheet.paragraph(capitalized(title), CARD.headline, lines=3)
    sheet.paragraph(text, CARD.text, FAINT, 8)
    return sheet.finished()


class _Drawing:
    """The parts of a picture of one sampling, each drawn below the one before."""

    def __init__(self, session: Session, summary: Summary, style: Style) -> None:
        self.session, self.summary, self.style = session, summary, style
        self.sheet = Sheet(style.width, style.margin)
        self.colors = _colors(summary.shares)

    def head(self, lines: int) -> None:
        """Speed and closeness in large letters; below the calls that the node computed, and its settings."""
        style = self.style
        self.sheet.paragraph(first_line(self.session, self.summary), style.headline, lines=lines)
        self.sheet.paragraph(headline(self.summary), style.text, lines=2)
        self.sheet.paragraph(self.session.handler.title, style.small, FAINT, lines=2)

    def shares(self, heading: str) -> None:
        """The shares of the calls, and what each color means."""
        style, summary = self.style, self.summary
        if heading:
            self._heading(heading)
        self.sheet.bar(
            [(self.colors[share.decision], float(share.calls)) for share in summary.shares],
            style.bar_height,
            style.text,
        )
        self.sheet.legend(self._legend_rows(), style.small)

    def times(self) -> None:
        """The shares of the attention's time, and the attention's share of the sampling."""
        style, summary, rest = self.style, self.summary, self.summary.seconds - self.summary.attention_seconds
        for heading, parts in (
            ("Attention time", [(self.colors[share.decision], share.seconds) for share in summary.shares]),
            ("Sampling: attention and the rest", [(TEXT, summary.attention_seconds), (FAINT, max(rest, 0.0))]),
        ):
            self._heading(heading)
            self.sheet.bar(parts, style.bar_height, style.text)

    def _legend_rows(self) -> Iterable[tuple[Color, str]]:
        shares, most = self.summary.shares, self.style.legend_rows
        shown = shares if len(shares) <= most else shares[: most - 1]
        for share in shown:
            label = share.decision.label
            if share.decision.backend is None:
                label = f"left to {share.decision.by or FULL_PRECISION}: {label}"
            yield self.colors[share.decision], f"{share.calls} calls{took(share, self.summary)}: {label}"
        rest = shares[len(shown) :]
        if rest:
            calls = sum(share.calls for share in rest)
            yield self.colors[rest[0].decision], f"{calls} calls: {len(rest)} rarer reasons, named in the text"

    def served(self) -> None:
        """A map of what computed each layer and step."""
        draw = partial(heatmap.served_map, self.summary, self.colors)
        self._map("What computed each layer (down) and step (across)", draw, None)

    def errors(self) -> None:
        """A map of the errors with its color bar; the largest error is framed and named."""
        cell = worst_cell(self.summary)
        assert cell is not None  # something was measured
        self._map("Error of each layer (down) and step (across)", partial(heatmap.error_map, self.summary), cell)
        style, sheet, found = self.style, self.sheet, self.summary.agreement[cell]
        sheet.paste(heatmap.color_bar(sheet.inner, style.small), style.margin)
        sheet.top += style.small + 8
        sheet.captions("0: full precision", f"{heatmap.error_scale(self.summary):.2g} relative L1", style.small)
        if heatmap.has_broken(self.summary):
            sheet.legend([(BROKEN, "NaN or infinity")], style.small)
        worst = f"{self.summary.layer_name(cell[0])} (row {cell[0]}), step {cell[1] + 1}"
        values = f"cosine {found.cosine:.4f}, relative L1 {found.relative_l1:.3f}"
        sheet.paragraph(f"Framed, the worst: {worst}: {values}", style.small, lines=2)

    def _heading(self, text: str) -> None:
        """Nearer to what it names than to what is above."""
        self.sheet.top += self.style.text // 2
        self.sheet.paragraph(text, self.style.text)

    def _map(self, heading: str, draw: Callable[[int, int], Image.Image], framed: LayerStep | None) -> None:
        """Layers from top to bottom, steps from left to right, one colored cell each, with numbers at both.

        Layers are counted from 0, as models name their blocks, and steps from 1, as in the text.
        """
        style, sheet, summary = self.style, self.sheet, self.summary
        self._heading(heading)
        left = style.margin + 3 * style.small
        width, height = style.width - style.margin - left, min(style.map_height, style.row_height * summary.layers)
        sheet.paste(draw(width, height), left)
        if framed is not None:
            box = heatmap.cell_box(summary, framed, width, height)
            sheet.frame((left + box[0], sheet.top + box[1], left + box[2], sheet.top + box[3]))
        bottom = sheet.top + height
        for number, place in _ticks(0, summary.layers, sheet.top, height, 2 * style.small):
            sheet.text(left - style.small // 2, place, str(number), style.small, FAINT, "rm")
        for number, place in _ticks(1, summary.steps, left, width, 3 * style.small):
            sheet.text(place, bottom + 6, str(number), style.small, FAINT, "ma")
        sheet.top = bottom + 2 * style.small


def _colors(shares: tuple[Share, ...]) -> dict[Decision, Color]:
    """A color for every decision: that of its mode, the same in every chart, or one for each reason."""
    decisions = [share.decision for share in shares]
    left = [decision for decision in decisions if decision.backend is None]
    colors = {decision: LEFT[min(index, len(LEFT) - 1)] for index, decision in enumerate(left)}
    for decision in decisions:
        if decision.backend is not None:
            assert decision.options is not None  # a backend has options
            colors[decision] = MODE_COLORS[decision.options.mode, decision.options.smooth_v]
    return colors


def _ticks(first: int, count: int, start: float, length: float, pitch: float) -> list[tuple[int, float]]:
    """Some of so many numbers from `first` on, evenly and at least `pitch` pixels apart, with the pixel of each."""
    count = max(count, 1)
    stride = max(1, -(-count // max(int(length / pitch), 1)))
    return [(first + place, start + (place + 0.5) * length / count) for place in range(0, count, stride)]
