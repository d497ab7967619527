"""Shared by all tests: one seed and few threads."""

from __future__ import annotations

import os
import secrets

import pytest
import torch


def pytest_configure() -> None:
    # Two threads everywhere, so that timings and floating-point sums do not depend on the machine's core count.
    torch.set_num_threads(2)
    # MKL's vector functions set themselves up in the first call of a process. Where two threads make it at once, one of
    # them may compute its half with less accuracy. One thread makes it here.
    torch.exp(torch.zeros(1))


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
