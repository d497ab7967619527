"""What all tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comfy_sage2 import plan


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """No test takes a plan that another one's kernels, bounds or times led to."""
    plan._plan.cache_clear()
    yield
    plan._plan.cache_clear()
