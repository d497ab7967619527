"""A backend that records what it binds, for tests of which backend serves a call."""

from __future__ import annotations

from typing import Any

import torch

from comfy_sage2.backends.base import Backend, BoundCall, BoundTensors
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.options import MODES


class FakeBackend(Backend):
    """A backend for some modes. Its calls return a tensor full of `value`; `bound` has their signatures."""

    def __init__(
        self, name: str, modes: tuple[str, ...] = MODES, *, accelerated: bool = True, value: float = 0.0
    ) -> None:
        self.name, self.accelerated, self.modes, self.value = name, accelerated, modes, value
        self.constraints = (_at_most_128,)
        self.bound: list[CallSignature] = []

    def is_for(self, mode: str) -> bool:
        return mode in self.modes

    def compute(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, signature: CallSignature, optional: OptionalTensors
    ) -> Any:
        """Output and LSE; tensors and output are (B, H, N, D)."""
        return torch.full_like(q, self.value), None

    def bind(self, signature: CallSignature) -> BoundCall:
        self.bound.append(signature)
        return _FakeCall(self, signature)


class _FakeCall(BoundTensors):
    def __init__(self, backend: FakeBackend, signature: CallSignature) -> None:
        super().__init__(signature)
        self._backend = backend

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Any:
        return self._backend.compute(q, k, v, self._signature, optional)


def _at_most_128(signature: CallSignature) -> str | None:
    return None if signature.head_dim <= 128 else f"head_dim must be at most 128, got {signature.head_dim}"
