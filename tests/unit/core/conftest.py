"""Every test gets fresh random inputs; of full products of three parameters, rows with every pair of values run."""

from __future__ import annotations

from pathlib import Path

import pytest
from covering import deselect_most_of_full_products
from declared_modules import declared_module
from recorder import STREAM

from comfy_sage2.backends import launches, self_test
from comfy_sage2.kernels import loader


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_most_of_full_products(config, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def always_fresh(fresh_seed: int) -> int:
    return fresh_seed


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel calls get this stream in place of a GPU's current one."""
    monkeypatch.setattr(launches, "current_stream", lambda device: STREAM)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel modules that csrc/architectures.json declares; all of them pass their self-test."""
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(loader, "load", declared_module)
    monkeypatch.setattr(self_test, "reason_against", lambda architecture, index, variants: None)
