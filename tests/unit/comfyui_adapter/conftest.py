"""Fixtures of the adapter's tests."""

from __future__ import annotations

import pytest

from comfy_sage2.backends.constraints import option_is
from comfy_sage2.dispatch import registry
from comfy_sage2.sparsity import levels

from .sparse_samplings import TOKENS


@pytest.fixture
def without_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take mode precise from the reference, so that the guard goes on to ComfyUI's attention."""
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b", "4b"),))


@pytest.fixture
def short_calls_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `sparse` skip blocks in calls of an eighth of the usual length, because the reference is slow."""
    assert levels.LEAST_BLOCKS == 64
    monkeypatch.setattr(levels, "LEAST_BLOCKS", TOKENS // 128)
