"""The wgmma kernels of csrc/sm90_*: Hopper (H100, H200). "4b" carries INT4 values through the int8 product."""

from __future__ import annotations

from .kernel_backend import KernelBackend

SM90 = KernelBackend("sm90", ((9, 0),), ("8b", "4b"), ("fp32",))
