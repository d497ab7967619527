"""What tests of the adapter share."""

from __future__ import annotations

import pytest

from comfy_sage2.backends.constraints import option_is
from comfy_sage2.dispatch import registry
from comfy_sage2.sparsity import levels

from .sparse_samplings import TOKENS


@pytest.fixture
def without_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's next attention is ComfyUI's, as with a kernel that lacks mode precise."""
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b", "4b"),))


@pytest.fixture
def short_calls_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is slow: here calls of an eighth of the length leave blocks out."""
    assert levels.LEAST_BLOCKS == 64
    monkeypatch.setattr(levels, "LEAST_BLOCKS", TOKENS // 128)
