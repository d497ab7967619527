"""Kernel modules that are not there, with the properties that csrc/architectures.json declares for them."""

from __future__ import annotations

from types import SimpleNamespace

from comfy_sage2.kernels import loader
from tools import kernel_table


def declared_module(architecture: str) -> SimpleNamespace:
    """A stand-in for the module of `architecture`."""
    declared = kernel_table.read(architecture)
    return SimpleNamespace(
        architecture=architecture,
        version=f"{loader.ABI_VERSION}.0.0",
        abi_version=loader.ABI_VERSION,
        modes=declared.modes,
        pv_formats=declared.pv_formats,
        pv_accumulators=declared.pv_accumulators,
    )
