"""What all unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comfy_sage2 import plan


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """No test takes a decision that another one's backends, constraints or GPUs led to."""
    plan._plan.cache_clear()
    yield
    plan._plan.cache_clear()
