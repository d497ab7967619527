"""Errors that tell that a device has no memory."""

from __future__ import annotations

import torch

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory: torch's allocator says so by an error of its own, CUDA by any other one."""
    if isinstance(error, torch.cuda.OutOfMemoryError):  # torch.OutOfMemoryError by the name that torch 2.4 has too
        return True
    # torch.AcceleratorError, or RuntimeError of a torch that lacks it.
    code = getattr(error, "error_code", None)
    return isinstance(error, RuntimeError) and (code == _MEMORY_ALLOCATION or "out of memory" in str(error).lower())
