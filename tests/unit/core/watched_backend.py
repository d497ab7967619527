"""A backend that keeps what it is asked to bind, and signatures of calls to ask it with: for tests of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from comfy_sage2.backends.base import Backend, BoundCall, BoundTensors
from comfy_sage2.call.signature import CallSignature, Routing
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.dispatch.plan import CallPlan, Refusal
from comfy_sage2.options import AUTO, MODES, AttentionOptions


class Watched(Backend):
    """A backend for some modes, which keeps what it binds; its calls give a tensor full of `value`."""

    def __init__(
        self, name: str, modes: tuple[str, ...] = MODES, *, accelerated: bool = True, value: float = 0.0
    ) -> None:
        self.name, self.accelerated, self._modes, self._value = name, accelerated, modes, value
        self.constraints = (_at_most_128,)
        self.bound: list[CallSignature] = []

    def is_for(self, mode: str) -> bool:
        return mode in self._modes

    def bind(self, signature: CallSignature) -> BoundCall:
        self.bound.append(signature)
        return WatchedCall(signature, self._value)


class Kernels(Watched):
    """Those of a GPU, which have P and V in FP8."""

    def settled(self, signature: CallSignature) -> CallSignature:
        signature = super().settled(signature)
        options = signature.options
        if options.mode not in ("8b", "4b") or options.pv != AUTO:
            return signature
        return signature._replace(options=replace(options, pv="fp8"))


class Package(Watched):
    """Another package's attention."""

    is_peer = True


class WatchedCall(BoundTensors):
    def __init__(self, signature: CallSignature, value: float) -> None:
        super().__init__(signature)
        self._value = value

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Any:
        return torch.full_like(q, self._value), None


def _at_most_128(signature: CallSignature) -> str | None:
    return None if signature.head_dim <= 128 else f"head_dim must be at most 128, got {signature.head_dim}"


def signature(**changes: Any) -> CallSignature:
    """Of a call of the CPU with grouped heads; `changes` are of `CallSignature.of` and of `Routing`."""
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
