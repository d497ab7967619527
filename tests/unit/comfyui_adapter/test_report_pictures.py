"""The report at a glance: its first words, its colors as color-blind readers see them, the worst cell."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from comfy_sage2.comfyui.report.chart import draw_card, draw_chart
from comfy_sage2.comfyui.report.colors import BACKGROUND, BROKEN, LEFT, PANEL, SERVED, ramp
from comfy_sage2.comfyui.report.heatmap import cell_box, error_map, served_map
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.report.verdict import compared_speed, verdict, worst_cell
from comfy_sage2.comfyui.session.record import Decision, SpeedComparison, Summary
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions

from .calls import node_session
from .test_report import BY_KERNEL, Watch, recorded, session_of

# What protanopes, deuteranopes and tritanopes see of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopes": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopes": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopes": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def cielab(colors: np.ndarray, seen_by: str = "everybody") -> np.ndarray:
    """CIE 1976 L*a*b* of sRGB bytes: another space than the one that the colors come from."""
    encoded = np.asarray(colors, dtype=np.float64) / 255.0
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear @ SEEN_BY[seen_by].T, 0.0, 1.0)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear @ to_xyz.T / to_xyz.sum(axis=1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)


@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_the_color_scale_is_even_for_every_eye(seen_by: str) -> None:
    """Each tenth of the scale is a visible step, none much larger than another, and lighter means larger."""
    seen = cielab(ramp(np.linspace(0.0, 1.0, 11)), seen_by)
    steps = np.linalg.norm(np.diff(seen, axis=0), axis=1)
    assert steps.min() > 4.5 and steps.max() < 2.0 * steps.min()
    assert (np.diff(seen[:, 0]) > 3.0).all()


@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_colors_with_a_meaning_differ_for_every_eye(seen_by: str) -> None:
    """A difference of 2.3 is just noticeable."""
    seen = cielab(np.array([*SERVED, *LEFT, BACKGROUND, PANEL]), seen_by)
    distances = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen[:-1], 2)]
    assert min(distances) > 9.0


def summary_of(
    *,
    speed: SpeedComparison | None = None,
    agreement: dict[tuple[int, int], Agreement] | None = None,
    served: bool = True,
    backend: str | None = BY_KERNEL.backend,
) -> Summary:
    """Ten seconds of sampling."""
    session = session_of()
    session.begin_sampling([1.0, 0.0])
    session.record.begin_pass(Watch(10.0))
    session.record.add(
        0, 0, replace(BY_KERNEL, backend=backend) if served else Decision(reason="no kernel"), Watch(5.0)
    )
    found = session.record.summary()
    return Summary(
        found.steps, found.layers, found.seconds, found.shares, found.cells, agreement or {}, speed, found.devices
    )


def close(cosine: float) -> dict[tuple[int, int], Agreement]:
    return {(0, 0): Agreement(cosine, 0.01, 0.1)}


@pytest.mark.parametrize(
    "summary, words",
    [
        (
            summary_of(speed=SpeedComparison(1, 14.0, 5.0), agreement=close(0.99989)),
            "1.9x faster sampling; very close to full precision (0.9998; 1 is identical)",
        ),
        (summary_of(speed=SpeedComparison(1, 5.3, 5.0)), "1.03x faster sampling; closeness not measured"),
        (summary_of(speed=SpeedComparison(1, 5.01, 5.0)), "equally fast sampling; closeness not measured"),
        (
            summary_of(speed=SpeedComparison(1, 1.0, 8.0), agreement=close(1.0)),
            "3.3x slower sampling: ComfyUI's own attention is faster here; very close to full precision (1.0000; 1 is "
            "identical)",
        ),
        (summary_of(agreement=close(0.995)), "speed not measured; close to full precision (0.9950; 1 is identical)"),
        (
            summary_of(agreement=close(0.97)),
            "speed not measured; less close to full precision (0.9700; 1 is identical)",
        ),
        (summary_of(agreement=close(0.5)), "speed not measured; far from full precision (0.5000; 1 is identical)"),
        (summary_of(agreement=close(float("nan"))), "speed not measured; the result has NaN or infinity"),
        (
            summary_of(speed=SpeedComparison(1, 1.0, 8.0), backend="reference"),
            "no speed-up: the slow reference ran, not a GPU kernel (3.3x slower sampling); closeness not measured",
        ),
        (
            summary_of(speed=SpeedComparison(1, 14.0, 5.0), backend="reference"),
            "no speed-up: the slow reference ran, not a GPU kernel; closeness not measured",
        ),
        (
            summary_of(backend="reference"),
            "no speed-up: the slow reference ran, not a GPU kernel; closeness not measured",
        ),
        (summary_of(served=False), "no speed-up: ComfyUI's attention computed every call"),
        (session_of().record.summary(), "no attention call reached the node"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_line_says_what_was_measured_and_what_not(summary: Summary, words: str) -> None:
    assert verdict(summary) == words


@pytest.mark.parametrize(
    "ratio, words", [(1.9, "1.9x faster"), (0.22, "4.5x slower"), (12.3, "12x faster"), (0.9999, "equally fast")]
)
def test_speeds_in_words(ratio: float, words: str) -> None:
    assert compared_speed(ratio) == words


def test_the_report_begins_with_it() -> None:
    assert (
        report([recorded()]).splitlines()[0] == "Speed not measured; close to full precision (0.9970; 1 is identical)"
    )
    idle = session_of(expected=Decision(reason="no kernel for this GPU"))
    assert report([idle]).splitlines()[0] == "Not active"


@pytest.mark.parametrize("layers, steps", [(1, 1), (7, 3), (60, 20), (1000, 100), (3, 1000)])
@pytest.mark.parametrize("width, height", [(700, 260), (50, 20)])
def test_the_worst_cell_shows_at_every_size(layers: int, steps: int, width: int, height: int) -> None:
    """Where cells share a pixel, too; and its frame is around it."""
    place = (layers * 2 // 3, steps // 3)
    agreement = {(layer, step): Agreement(1.0, 0.01, 0.0) for layer in range(layers) for step in range(steps)}
    agreement[place] = Agreement(0.5, 0.7, 0.0)
    summary = Summary(steps, layers, 1.0, (), {}, agreement)
    assert worst_cell(summary) == place
    pixels = np.asarray(error_map(summary, width, height))
    assert pixels.shape == (height, width, 3)
    rows, columns = np.nonzero((pixels == ramp(np.array(1.0))).all(axis=2))
    left, top, right, bottom = cell_box(summary, place, width, height)
    assert len(rows) and left <= columns.min() and columns.max() < right and top <= rows.min() and rows.max() < bottom


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_cell_is_the_worst_and_stays_visible(value: float) -> None:
    agreement = {(layer, 0): Agreement(0.9, 0.5, 0.0) for layer in range(500)}
    agreement[400, 0] = Agreement(value, value, value)
    summary = Summary(1, 500, 1.0, (), {}, agreement)
    assert worst_cell(summary) == (400, 0)
    assert (np.asarray(error_map(summary, 30, 40)) == np.array(BROKEN)).all(axis=2).any()


def test_a_call_left_to_comfyui_shows_where_layers_share_a_pixel() -> None:
    session = session_of()
    session.begin_sampling([1.0, 0.0])
    left = Decision(reason="left")
    for layer in range(1000):
        session.record.add(layer, 0, left if layer == 501 else BY_KERNEL, Watch(1.0))
    pixels = np.asarray(served_map(session.record.summary(), {BY_KERNEL: SERVED[0], left: LEFT[0]}, 40, 100))
    assert {tuple(row[0]) for row in pixels.tolist()} == {SERVED[0], LEFT[0]}


@pytest.mark.parametrize("text", ["\x00\x1b[31m" * 50_000, "\ud800\u202e" * 50_000, "a\n" * 100_000, "🦊 文字 " * 1000])
def test_hosblock_reasons_are_drawn(text: str) -> None:
    session = node_session(Settings(mode="8b"))
    session.begin_sampling([1.0, 0.0])
    session.record.add(0, 0, Decision(reason=text), Watch(1.0))
    session.record.add(1, 0, Decision("sm90", AttentionOptions()), Watch(1.0))
    session.record.add_agreement(1, 0, torch.tensor([1.0, 0.0, 0.0]))
    for draw in (draw_card, draw_chart):
        assert draw([session]).height < 2000
