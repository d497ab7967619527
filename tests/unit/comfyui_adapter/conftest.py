"""What tests of the adapter share."""

from __future__ import annotations

import pytest

from comfy_sage2 import registry
from comfy_sage2.backends.constraints import option_is


@pytest.fixture
def without_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's next attention is ComfyUI's, as with a kernel that lacks mode precise."""
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b", "4b"),))
