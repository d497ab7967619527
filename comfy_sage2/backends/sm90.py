"""The wgmma kernels of csrc/sm90_*: Hopper (H100, H200). "4b" carries INT4 values through the int8 product."""

from __future__ import annotations

from .constraints import slices_at_most
from .kernel_backend import KernelBackend

# Heads of all batches are a grid's second dimension in the statistics pass and its third in that of smooth Q.
SM90 = KernelBackend("sm90", ((9, 0),), ("8b", "4b"), ("fp32",), (slices_at_most(65535),))
