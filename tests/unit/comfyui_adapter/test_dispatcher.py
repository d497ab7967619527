"""The dispatcher alone: what it plans for a call, with a guard that is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.call_site import CallSite
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.selector import FixedSelector

from .calls import REFERENCE

SITE = CallSite(0, None, 0, 4, 64)


def chosen(mode: str, least: str | None, **arguments: Any) -> Decision:
    """What is decided for a call in `mode`, of whose layer the guard says it may be computed in `least` or better."""
    selector = FixedSelector(AttentionOptions(mode))
    handler = Dispatcher(Settings(backend="reference"), REFERENCE, selector)
    watched: Any = SimpleNamespace(restricted={0}, reason=lambda layer: None, mode=lambda layer: least)
    handler.guard = watched
    return handler.choose(AttentionCall.of((*torch.randn(3, 1, 64, 128).unbind(), 2), arguments), SITE)


@pytest.mark.parametrize("least", [None, "8b", "precise"])
@pytest.mark.parametrize("mode", ["4b", "8b", "precise", "exact"])
def test_the_guard_makes_no_call_less_exact(mode: str, least: str | None) -> None:
    """A layer that the policy has in precise stays there when samples in 4b have shown that it needs 8b."""
    order = ("4b", "8b", "precise", "exact")
    wanted = mode if least is None else max(mode, least, key=order.index)
    options = chosen(mode, least).options
    assert options is not None and options.mode == wanted


@pytest.mark.parametrize("mode", ["4b", "8b", "precise", "exact"])
def test_the_calls_own_scale_is_planned(mode: str) -> None:
    """One that is refused says nothing about the next, and one that was planned is not taken for another."""
    for scale, planned in ((0.25, 0.25), (-1.0, None), (None, 0.125), (0.5, 0.5)):
        decision = chosen(mode, None, scale=scale)
        if planned is None:
            assert decision.plan is None and "SA-205" in str(decision.reason)
        else:
            assert decision.plan is not None and decision.plan.request.scale == planned
