"""Recognizes errors that mean that a device is out of memory."""

from __future__ import annotations

import torch

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device was out of memory: torch's allocator has its own error for it, CUDA may raise any other one."""
    if isinstance(error, torch.cuda.OutOfMemoryError):  # torch.OutOfMemoryError by the name that torch 2.4 has too
        return True
    # torch.AcceleratorError, or RuntimeError of a torch that lacks it.
    code = getattr(error, "error_code", None)
    return isinstance(error, RuntimeError) and (code == _MEMORY_ALLOCATION or "out of memory" in str(error).lower())
