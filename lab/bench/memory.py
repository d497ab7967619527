"""The memory that a call takes beyond its inputs and its output."""

from __future__ import annotations

from collections.abc import Callable

import torch


def extra_bytes(run: Callable[[], torch.Tensor]) -> int:
    """Peak of the bytes that one call allocates from torch, without those of its output."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    held_already = after == before  # the output was allocated beforehand, as with cuDNN's graphs
    return torch.cuda.max_memory_allocated() - before - (0 if held_already else out.nbytes)
