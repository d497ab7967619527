"""The mma.sync kernels of csrc/sm89_*: Ada (sm89), and their 8-bit part for Blackwell (sm120) and Ampere (sm80)."""

from __future__ import annotations

from .kernel_backend import KernelBackend

SM89 = KernelBackend("sm89", ((8, 9),), ("8b", "4b"), ("fp32", "fp16"))
# Compiled, and their numerics compared with the reference on another GPU; neither was run on hardware of its own.
SM120 = KernelBackend("sm120", ((12, 0), (12, 1)), ("8b",), ("fp32", "fp16"))
SM80 = KernelBackend("sm80", ((8, 0), (8, 6), (8, 7)), ("8b",), ("fp32",))
