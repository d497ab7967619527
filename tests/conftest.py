"""Shared by all tests: one seed and one thread.

Only fixtures import torch, here and in unit/conftest.py: the controller of pytest-xdist runs no tests, and the workers
start after it has read these files.
"""

from __future__ import annotations

import os
import secrets

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    # Calls here are small, and a second thread's waiting costs more than its work saves. One thread also makes sums and
    # times independent of the machine's number of cores.
    torch.set_num_threads(1)


def begin_random_numbers(seed: int) -> None:
    import torch

    # Without a GPU torch.manual_seed queues a stack trace for each kind of device: a third of an empty test's time.
    begin = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    begin(seed)


@pytest.fixture(autouse=True)
def seed() -> None:
    begin_random_numbers(0)


@pytest.fixture
def fresh_seed(seed: None) -> int:
    """New random inputs in every run. The seed is printed; set COMFY_SAGE2_TEST_SEED to it to repeat the run."""
    fresh = int(os.environ.get("COMFY_SAGE2_TEST_SEED") or secrets.randbits(32))
    print(f"COMFY_SAGE2_TEST_SEED={fresh}")
    begin_random_numbers(fresh)
    return fresh
