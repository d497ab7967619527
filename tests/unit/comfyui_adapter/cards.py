"""GPUs that are not there: backends whose outputs tell who served, and what attentions take on a card."""

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
# What the outputs of a backend, or of ComfyUI's own attention, are full of.
VALUES = {"comfyui": 1.0, "sm90": 2.0, "torch-cudnn": 3.0, "torch-flash": 4.0, KITCHEN: 5.0}


class Constant(FakeBackend):
    """A backend whose flag says that its output is broken."""

    def compute(self, *tensors: Any) -> Any:
        *_, optional = tensors
        if optional.nonfinite is not None:
            optional.nonfinite.fill_(1)
        return super().compute(*tensors)


class Package(Constant):
    """Another package's attention. Its first calls raise as often as `broken` says."""

    is_peer = True
    broken = 0

    def compute(self, *tensors: Any) -> Any:
        if self.broken:
            self.broken -= 1
            raise RuntimeError("[SA-115] the package failed")
        return super().compute(*tensors)


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> Package:
    """These backends and the reference are all there are, beside a package, which is returned."""
    modes = {name: MODES if name == "sm90" else (EXACT,) for name in names}
    backends = [Constant(name, modes[name], value=VALUES[name]) for name in names]
    monkeypatch.setattr(registry, "BACKENDS", (*backends, registry.get("reference")))
    package = Package(KITCHEN, MODES, value=VALUES[KITCHEN])
    monkeypatch.setattr(registry, "PEERS", (package,))
    return package


def card(seconds: Mapping[Candidate, float | Mapping[int, float]], errors: Mapping[Candidate, float]) -> TunedChoices:
    """A GPU on which attentions take so many nanoseconds a pair, or so many by head_dim, with these relative errors."""
    works = [Work(16, n, n, head_dim) for n in (1024, 4096) for head_dim in (64, 128)]
    times = {
        (candidate, work): 1e-9 * work.pairs * (each[work.head_dim] if isinstance(each, Mapping) else each)
        for candidate, each in seconds.items()
        for work in works
    }
    of = {(candidate, head_dim): (error,) for candidate, error in errors.items() for head_dim in (64, 128)}
    return TunedChoices(Times(times, 0.0, of))


def half(length: int = 64, keys: int | None = None) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, n, 128).half() for n in (length, keys or length, keys or length))
