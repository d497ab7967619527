"""Mode precise as the guard's next attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.options import AttentionOptions

from .calls import SIGMAS, call, qkv, serve_by, session_with


class Kernel:
    """An attention whose output is NaN in the modes `broken`, else 10, 20 or 30 by the mode's place in `ORDER`."""

    ORDER = ("4b", "8b", "precise")

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.modes: list[str] = []

    def __call__(self, q: torch.Tensor, *args: Any, options: AttentionOptions, **kwargs: Any) -> torch.Tensor:
        self.modes.append(options.mode)
        value = float("nan") if options.mode in self.broken else 10.0 * (1 + self.ORDER.index(options.mode))
        return torch.full_like(q, value)


def sampled(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Session, list[float]]:
    """Make one guarded call in each of two steps; return the session and the mean of each output."""
    serve_by(monkeypatch, kernel)
    session = session_with(guard=True, **options)
    return session, [float(call(session, *qkv(), 2, sigma=sigma).mean()) for sigma in (1.0, 0.5)]


@pytest.mark.parametrize(
    ("mode", "broken", "modes", "words"),
    [
        ("8b", Kernel.ORDER, ["8b", "precise"], "(reference · 8b, then reference · precise); ComfyUI's attention"),
        ("precise", ("precise",), ["precise"], "(reference · precise); ComfyUI's attention"),
    ],
)
def test_comfyui_computes_calls_that_break_in_precise(
    monkeypatch: pytest.MonkeyPatch, mode: str, broken: tuple[str, ...], modes: list[str], words: str
) -> None:
    kernel = Kernel(*broken)
    session, means = sampled(kernel, monkeypatch, mode=mode)
    assert means == [1.0, 1.0] and kernel.modes == modes
    assert f"{words} computed it again" in report([session])


@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_the_guard_tries_precise_next(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("8b", "4b")
    session, means = sampled(kernel, monkeypatch, mode=mode)
    assert means == [30.0, 30.0] and kernel.modes == [mode, "precise", "precise"]
    text = report([session])
    assert f"in step 1 (reference · {mode}); reference · precise computed it again, and computes this layer" in text
    shares = {share.decision.label: share.calls for share in session.record.summary().shares}
    assert shares == {"reference · precise": 2}
    session.begin_sampling(SIGMAS)
    assert session.dispatcher.guard is not None and not session.dispatcher.guard.downgraded


def test_a_layer_that_breaks_in_precise_later_is_left_to_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("8b")
    session, _ = sampled(kernel, monkeypatch)
    kernel.broken = Kernel.ORDER
    assert [float(call(session, *qkv(), 2, sigma=0.25).mean()) for _ in range(2)] == [1.0, 1.0]
    assert kernel.modes == ["8b", "precise", "precise", "precise"]
    assert "in step 4 (reference · precise); ComfyUI's attention computed it again" in report([session])
