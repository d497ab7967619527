"""The report's picture: its figures, its colors, and its long texts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_sage2.comfyui.report.picture import (
    AMBER,
    ERROR_COLORS,
    GREEN,
    HEIGHT,
    MARGIN,
    MODE_COLORS,
    USUAL_ERRORS,
    WHITE,
    WIDTH,
    draw,
    figures,
)
from comfy_sage2.comfyui.session.record import Decision, Share
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.options import AttentionOptions

from .test_report import BY_KERNEL, Watch, session_of
from .test_verdict import summary_of

LEFT = Decision(reason="too short")


def colors_of(image: Image.Image) -> Counter[Any]:
    """Color -> pixels."""
    return Counter({color: count for count, color in image.getcolors(maxcolors=1 << 24) or ()})


def session_with_calls(*decisions: Decision) -> Session:
    """A sampling with a call of 1 s for each decision."""
    session = session_of()
    session.begin_sampling([1.0, 0.0])
    session.record.begin_pass(Watch(10.0))
    for layer, decision in enumerate(decisions):
        session.record.add(layer, 0, decision, Watch(1.0))
    return session


def test_the_figures_are_speed_closeness_and_attention() -> None:
    faster = summary_of((14.0, 5.0), 0.99989)
    assert figures(faster) == (
        ("1.9x faster", "10.0 s, was 19.0 s", GREEN),
        ("very close", "0.9998, 1 is identical", WHITE),
        ("8b", "100% of the time", WHITE),
    )
    speed, closeness, computed_by = figures(summary_of(backend=None))
    assert (speed.value, closeness.value, computed_by[:2]) == ("10.0 s", "?", ("ComfyUI", "100% of the time"))
    assert figures(summary_of((1.0, 8.0)))[0].color == AMBER
    assert figures(summary_of(cosine=float("nan")))[1].value == "NaN"
    not_timed = replace(faster, timed=False, shares=(Share(BY_KERNEL, 3, 0.0), Share(LEFT, 1, 0.0)))
    assert figures(not_timed)[2][:2] == ("8b", "75% of the calls")
    peer = replace(BY_KERNEL, backend="comfy-kitchen", is_peer=True, reason="faster here")
    assert figures(replace(faster, shares=(Share(peer, 1, 1.0),)))[2].value == "comfy-kitchen"
    assert figures(summary_of(backend="reference"))[2][:2] == ("8b", "by the slow reference")


def test_the_bar_is_divided_like_the_time() -> None:
    """Each mode keeps its color, whichever is the more frequent one."""
    eight, four = BY_KERNEL, Decision("sm89", AttentionOptions("4b"))
    for decisions, ratio in (((eight, four, four, four), 3.0), ((four, eight, eight, eight), 1.0 / 3.0)):
        image, _ = draw([session_with_calls(*decisions)])
        row = colors_of(image.crop((MARGIN, 172, WIDTH - MARGIN, 180)))
        assert row[MODE_COLORS["4b"]] / row[MODE_COLORS["8b"]] == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("mode", USUAL_ERRORS)
def test_the_chart_maps_the_errors_relative_to_the_usual_ones(mode: str) -> None:
    """Two kinds of attention, side by side; a cell's color shows its error as a share of the mode's usual error."""
    session, shares = session_of(), (0.0, 1.0, 2.0, 9.0, math.nan)
    session.begin_sampling([1.0 - step / len(shares) for step in range(len(shares) + 1)])
    decision = replace(BY_KERNEL, options=AttentionOptions(mode))
    for kind in ("cross", "self"):
        for step, share in enumerate(shares):
            layer = session.record.layer_of(f"block 0 {kind}")
            session.record.add(layer, step, decision, Watch(1.0))
            measured = torch.tensor([1.0, share * USUAL_ERRORS[mode] if kind == "self" else 0.0, 0.0])
            session.record.add_agreement(layer, step, measured)
    session.end_sampling()
    card, chart = draw([session])
    assert chart.crop((0, 0, WIDTH, HEIGHT)).tobytes() == card.tobytes()
    middle, width = HEIGHT + 80, (WIDTH - 3 * MARGIN) // 2
    cells = [chart.getpixel((WIDTH // 2 + MARGIN + round(width * (step + 0.5) / 5), middle)) for step in range(5)]
    *colors, most = ERROR_COLORS.values()
    assert torch.tensor(cells).sub(torch.tensor([*colors, most, most])).abs().max() <= 1
    assert chart.getpixel((MARGIN + width // 2, middle)) == colors[0]


def test_a_text_that_is_too_long_is_shortened() -> None:
    image, _ = draw([session_of(expected=Decision(reason="x" * 400))])
    shortened = image.crop((WIDTH - MARGIN - 60, 0, WIDTH - MARGIN, HEIGHT))
    assert len(colors_of(shortened)) > 1  # the text extends nearly to the margin
