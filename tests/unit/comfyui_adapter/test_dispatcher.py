"""The dispatcher alone: what it plans for a call, with a guard that is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.call.call_site import CallSite
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.record import Decision

from .calls import REFERENCE, settings

SITE = CallSite(0, None, 0, 4, 64)


def chosen(mode: str, needs_precise: bool = False, **arguments: Any) -> Decision:
    """What is decided for a call in `mode`, of whose layer the guard says whether it needs precise."""
    dispatcher = Dispatcher(settings(mode=mode), REFERENCE)
    guard: Any = SimpleNamespace(downgraded={0: SimpleNamespace(in_precise=True)} if needs_precise else {})
    dispatcher.guard = guard
    return dispatcher.choose(AttentionCall.of((*torch.randn(3, 1, 64, 128).unbind(), 2), arguments), SITE)


@pytest.mark.parametrize("needs_precise", [False, True])
@pytest.mark.parametrize("mode", ["4b", "8b", "precise", "exact"])
def test_the_guard_makes_no_call_less_exact(mode: str, needs_precise: bool) -> None:
    wanted = "precise" if needs_precise and mode != "exact" else mode
    options = chosen(mode, needs_precise).options
    assert options is not None and options.mode == wanted


@pytest.mark.parametrize("mode", ["4b", "8b", "precise", "exact"])
def test_the_calls_own_scale_is_planned(mode: str) -> None:
    """One that is refused says nothing about the next, and one that was planned is not taken for another."""
    for scale, planned in ((0.25, 0.25), (-1.0, None), (None, 0.125), (0.5, 0.5)):
        decision = chosen(mode, scale=scale)
        if planned is None:
            assert decision.plan is None and "SA-205" in str(decision.reason)
        else:
            assert decision.plan is not None and decision.plan.signature.scale == planned
