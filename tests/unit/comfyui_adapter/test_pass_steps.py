"""In which step a pass of the model is: when the host asks the device for it, and what a pass without calls changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.system.readback import Readback

from .calls import Executor, node_session, ones, qkv, settings


def run_pass(session: Session, sigma: float, calls: int, events: list[str]) -> None:
    override = make_override(session)

    def model(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        events.append("model")
        for _ in range(calls):
            override(ones, *qkv(), 4, _inside_attn_wrapper=True, transformer_options={})
        events.append("end")
        return x

    session.evaluations += 1
    pass_wrapper(session)(Executor(model), torch.zeros(1), torch.tensor([sigma, sigma]))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in its order: models begin and end, and the host reads what devices have computed."""
    happened: list[str] = []
    values = Readback.values

    def reading(readback: Readback, count: int | None = None) -> list[float]:
        happened.append("read")
        return values(readback, count)

    monkeypatch.setattr(Readback, "values", reading)
    return happened


def test_the_host_waits_for_the_noise_level_at_the_first_call(events: list[str]) -> None:
    """Before that, the device would have nothing to do meanwhile."""
    session = node_session(settings())
    session.begin_sampling([1.0, 0.75, 0.5, 0.0])
    run_pass(session, 0.5, 2, events)
    assert events == ["model", "read", "end"]
    assert session.record.summary().cells.keys() == {(0, 2), (1, 2)}


def test_a_pass_without_calls_leads_on_to_the_next_step(events: list[str]) -> None:
    """Levels may repeat: which of them a pass is at depends on the one before."""
    session = node_session(settings())
    session.begin_sampling([1.0, 0.5, 0.5, 0.5, 0.0])
    for sigma, calls in ((1.0, 1), (0.5, 0), (0.5, 1)):
        run_pass(session, sigma, calls, events)
    assert session.record.summary().cells.keys() == {(0, 0), (0, 2)}
