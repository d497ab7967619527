"""Attentions that return NaN in chosen calls, and guarded samplings with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import guard
from comfy_sage2.comfyui.session.session import Session

from .calls import node_session, serve_by, settings

SIGMAS = [1.0, 0.5, 0.0]
LAYERS = 3


class Breaking:
    """An attention whose output has one NaN in the calls `broken`, counted from 0; these calls set `nonfinite`."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.calls = 0

    def __call__(
        self, q: torch.Tensor, *args: Any, nonfinite: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        out = torch.full_like(q, 2.0)
        if self.calls in self.broken:
            out[0, 0, 0, 0] = float("nan")
            if nonfinite is not None:
                nonfinite.fill_(1)
        self.calls += 1
        return out


def sampled(
    monkeypatch: pytest.MonkeyPatch, kernel: Breaking, func: Any, guarded: bool = True, at_end: bool = False
) -> tuple[Session, list[float]]:
    """Run one sampling of two steps and three layers; return its session and the mean of each call's output."""
    serve_by(monkeypatch, kernel)
    session = node_session(settings(guard=guarded))
    override = make_override(session)
    session.begin_sampling(SIGMAS)

    def model() -> list[float]:
        return [float(override(func, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(LAYERS)]

    means = []
    for sigma in SIGMAS[:-1]:
        model_pass = session.begin_pass(sigma, torch.device("cpu"), {})
        model_pass.check_at_end = at_end
        means += session.run_pass(model_pass, model)
    return session, means


def guard_of(session: Session) -> guard.Guard:
    assert session.dispatcher.guard is not None
    return session.dispatcher.guard


def ones(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ones_like(q)


def nothing_finite(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(q, float("nan"))
