"""Hooks and fixtures that all tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from covering import deselect_most_of_full_products

from comfy_sage2.dispatch import plan

# Without a device no test is collected, so that none reports a skip.
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_most_of_full_products(config, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """No test gets a plan that was made for the kernels, bounds or times of another test."""
    plan._plan.cache_clear()
    yield
    plan._plan.cache_clear()
