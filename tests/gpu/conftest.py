"""What all tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from covering import deselect_most_of_full_products

from comfy_sage2.dispatch import plan

# Without a device there is nothing to run, and nothing to tell.
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_most_of_full_products(config, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """No test takes a plan that another one's kernels, bounds or times led to."""
    plan._plan.cache_clear()
    yield
    plan._plan.cache_clear()
