"""What tests of the adapter share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from comfy_sage2 import registry
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.sparsity.levels import LEVELS

from .sparse_samplings import TOKENS


@pytest.fixture
def without_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's next attention is ComfyUI's, as with a kernel that lacks mode precise."""
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b", "4b"),))


@pytest.fixture
def short_calls_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is slow: here calls of half the length leave blocks out."""
    for name, level in LEVELS.items():
        assert level.least_blocks == 64
        monkeypatch.setitem(LEVELS, name, replace(level, least_blocks=TOKENS // 128))
