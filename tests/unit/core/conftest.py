"""Fresh random inputs for every run: the seed is printed, and COMFY_SAGE2_TEST_SEED repeats a run."""

from __future__ import annotations

import os
import secrets

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_seed() -> int:
    seed = int(os.environ.get("COMFY_SAGE2_TEST_SEED") or secrets.randbits(32))
    print(f"COMFY_SAGE2_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return seed
