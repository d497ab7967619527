"""Every test here has fresh random inputs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def always_fresh(fresh_seed: int) -> int:
    return fresh_seed
