"""Shared by all tests: one seed and one thread."""

from __future__ import annotations

import os
import secrets

import pytest
import torch


def pytest_configure() -> None:
    # Calls here are small, and a second thread's waiting costs more than its work saves. One also makes sums and times
    # those of every machine, whatever its number of cores.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_seed(seed: None) -> int:
    """Other random inputs in every run: the seed is printed, and COMFY_SAGE2_TEST_SEED repeats a run."""
    fresh = int(os.environ.get("COMFY_SAGE2_TEST_SEED") or secrets.randbits(32))
    print(f"COMFY_SAGE2_TEST_SEED={fresh}")
    torch.manual_seed(fresh)
    return fresh
