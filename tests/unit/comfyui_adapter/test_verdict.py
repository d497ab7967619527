"""The report at a glance: its first line, and the cell whose output was furthest from full precision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from comfy_sage2.comfyui.report.verdict import verdict, worst_cell
from comfy_sage2.comfyui.session.record import Decision, SpeedComparison, Summary
from comfy_sage2.metrics import Agreement

from .test_report import BY_KERNEL, Watch, session_of


def summary_of(
    speed: tuple[float, float] | None = None, cosine: float | None = None, backend: str | None = BY_KERNEL.backend
) -> Summary:
    """Ten seconds of sampling. speed: seconds of its calls by ComfyUI's attention and by the backend; None: unknown."""
    session = session_of()
    session.begin_sampling([1.0, 0.0])
    session.record.begin_pass(Watch(10.0))
    decision = Decision(reason="no kernel") if backend is None else replace(BY_KERNEL, backend=backend)
    session.record.add(0, 0, decision, Watch(5.0))
    agreement = {} if cosine is None else {(0, 0): Agreement(cosine, 0.01, 0.1)}
    comparison = None if speed is None else SpeedComparison(1, *speed)
    return replace(session.record.summary(), agreement=agreement, speed=comparison)


FASTER, SLOWER, BY_REFERENCE = (14.0, 5.0), (1.0, 8.0), "no speed-up: the slow reference ran, not a GPU kernel"


@pytest.mark.parametrize(
    "summary, words",
    [
        (summary_of(FASTER, 0.99989), "1.9x faster sampling; very close to full precision (0.9998; 1 is identical)"),
        (summary_of((5.3, 5.0)), "1.03x faster sampling; closeness not measured"),
        (summary_of((5.01, 5.0)), "equally fast sampling; closeness not measured"),
        (
            summary_of(SLOWER, 1.0),
            "3.3x slower sampling: ComfyUI's own attention is faster here; very close to full precision (1.0000; 1 is "
            "identical)",
        ),
        (summary_of(cosine=0.995), "speed not measured; close to full precision (0.9950; 1 is identical)"),
        (summary_of(cosine=0.97), "speed not measured; less close to full precision (0.9700; 1 is identical)"),
        (summary_of(cosine=0.5), "speed not measured; far from full precision (0.5000; 1 is identical)"),
        (summary_of(cosine=float("nan")), "speed not measured; the result has NaN or infinity"),
        (summary_of(SLOWER, backend="reference"), f"{BY_REFERENCE} (3.3x slower sampling); closeness not measured"),
        (summary_of(FASTER, backend="reference"), f"{BY_REFERENCE}; closeness not measured"),
        (summary_of(backend="reference"), f"{BY_REFERENCE}; closeness not measured"),
        (summary_of(backend=None), "no speed-up: ComfyUI's attention computed every call"),
        (session_of().record.summary(), "no attention call reached the node"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_line_says_what_was_and_was_not_measured(summary: Summary, words: str) -> None:
    assert verdict(summary) == words


@pytest.mark.parametrize("value", [0.7, float("nan"), float("inf")])
def test_the_worst_cell(value: float) -> None:
    agreement = {(layer, step): Agreement(1.0, 0.01, 0.0) for layer in range(7) for step in range(3)}
    agreement[4, 1] = Agreement(0.5, value, 0.0)
    assert worst_cell(Summary(3, 7, 1.0, (), {}, agreement)) == (4, 1)
    assert worst_cell(Summary(3, 7, 1.0, (), {}, {})) is None
