"""Work that brings the GPU to the temperature and the clocks of sustained load before anything is timed."""

from __future__ import annotations

import time

import torch

_SIZE = 8192  # matrix products of this size take milliseconds, and as much power as a GPU gives
_AT_ONCE = 4


def heat(seconds: float) -> None:
    """Multiply matrices on the current device for this long."""
    matrix = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(_AT_ONCE):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
