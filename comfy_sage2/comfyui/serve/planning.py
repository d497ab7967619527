"""From the node's options to what decides each call's mode on this model and machine."""

from __future__ import annotations

from typing import Any

from ...policy.plan import Choice, FixedPlan, Plan
from ...policy.rules import RulePlan
from ...policy.signature import Signature
from ..settings import Settings
from .selection import Selection


def signature_of(model: Any) -> Signature:
    """What kind of model `model` (ComfyUI's ModelPatcher) is."""
    return Signature.of(type(model.model).__name__, model.model.model_config.unet_config)


def usual_mode(settings: Settings) -> str:
    """The mode by which to ask whether any backend works here: auto and policies can do with 8 bits alone."""
    return "8b" if settings.policy is not None or settings.mode == "auto" else settings.mode


def plan_for(settings: Settings, expected: Selection, model: Any) -> Plan:
    """The plan of a node at work with `expected`'s backend on `model`.

    Raises ValueError, naming the differences, when the settings' policy was made for another kind of model.
    """
    if settings.policy is not None and settings.mode != "off":
        settings.policy.signature.require(signature_of(model))
        return settings.policy
    if settings.mode == "auto":
        return RulePlan(type(model.model).__name__, expected.backend or "")
    return FixedPlan(Choice(settings.mode, settings.smooth_v))
