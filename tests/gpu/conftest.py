"""What all tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comfy_sage2.dispatch import plan

from .covering import without_full_products

# Without a device there is nothing to run, and nothing to tell.
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    left_out = set(here) - set(without_full_products(here))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """No test takes a plan that another one's kernels, bounds or times led to."""
    plan._plan.cache_clear()
    yield
    plan._plan.cache_clear()
