"""Pretended GPUs: backends whose outputs identify them, and the times of attentions on a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend

from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Candidate, Times, Work
from comfy_sage2.dispatch import registry
from comfy_sage2.options import EXACT, MODES

KITCHEN = "comfy-kitchen"
# The value that fills the output of a backend, or of ComfyUI's own attention.
VALUES = {"comfyui": 1.0, "sm90": 2.0, "torch-cudnn": 3.0, "torch-flash": 4.0, KITCHEN: 5.0}


class Constant(FakeBackend):
    """A backend that sets the flag for a broken output."""

    def compute(self, *tensors: Any) -> Any:
        *_, optional = tensors
        if optional.nonfinite is not None:
            optional.nonfinite.fill_(1)
        return super().compute(*tensors)


class Package(Constant):
    """Another package's attention. Its next `broken` calls raise."""

    is_peer = True
    broken = 0

    def compute(self, *tensors: Any) -> Any:
        if self.broken:
            self.broken -= 1
            raise RuntimeError("[SA-115] the package failed")
        return super().compute(*tensors)


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> Package:
    """Leave only these backends, the reference and another package's attention, and return the latter."""
    modes = {name: MODES if name == "sm90" else (EXACT,) for name in names}
    backends = [Constant(name, modes[name], value=VALUES[name]) for name in names]
    monkeypatch.setattr(registry, "BACKENDS", (*backends, registry.get("reference")))
    package = Package(KITCHEN, MODES, value=VALUES[KITCHEN])
    monkeypatch.setattr(registry, "PEERS", (package,))
    return package


def card(
    nanoseconds: Mapping[Candidate, float | Mapping[int, float]], errors: Mapping[Candidate, float]
) -> TunedChoices:
    """The timings of a GPU. nanoseconds: per pair, or per pair by head_dim; errors: relative errors."""
    works = [Work(16, n, n, head_dim) for n in (1024, 4096) for head_dim in (64, 128)]
    times = {
        (candidate, work): 1e-9 * work.pairs * (per_pair[work.head_dim] if isinstance(per_pair, Mapping) else per_pair)
        for candidate, per_pair in nanoseconds.items()
        for work in works
    }
    by_head_dim = {(candidate, head_dim): (error,) for candidate, error in errors.items() for head_dim in (64, 128)}
    return TunedChoices(Times(times, 0.0, by_head_dim))


def half(length: int = 64, keys: int | None = None) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, n, 128).half() for n in (length, keys or length, keys or length))
