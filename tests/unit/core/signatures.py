"""Signatures of calls and their plans."""

from __future__ import annotations

from typing import Any

import torch

from comfy_sage2.call.signature import CallSignature, Routing
from comfy_sage2.call.tensors import NO_TENSORS
from comfy_sage2.dispatch.plan import CallPlan, Refusal
from comfy_sage2.options import AttentionOptions


def signature(**changes: Any) -> CallSignature:
    """The signature of a CPU call with grouped heads. `changes` go to `CallSignature.of` and to `Routing`."""
    routing = {name: changes.pop(name) for name in Routing._fields if name in changes}
    given: dict[str, Any] = {
        "q": torch.empty(2, 4, 16, 64),
        "k": torch.empty(2, 2, 24, 64),
        "v": torch.empty(2, 2, 24, 64),
        "options": AttentionOptions(),
        "optional": NO_TENSORS,
        "routing": Routing(**routing),
        **changes,
    }
    return CallSignature.of(**given)


def planned(decided: CallPlan | Refusal) -> CallPlan:
    assert isinstance(decided, CallPlan), decided
    return decided


def refused(decided: CallPlan | Refusal) -> Refusal:
    assert isinstance(decided, Refusal)
    return decided
