"""Every test here has fresh random inputs; of products of three parameters, each pair of values is tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from covering import deselect_most_of_full_products


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_most_of_full_products(config, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def always_fresh(fresh_seed: int) -> int:
    return fresh_seed
