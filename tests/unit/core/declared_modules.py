"""Kernel modules that are not there, with the properties that csrc/architectures.json declares for them."""

from __future__ import annotations

from types import SimpleNamespace

from comfy_sage2.kernels import abi
from tools import kernel_table


def declared_module(architecture: str, abi_version: int = abi.ABI_VERSION) -> SimpleNamespace:
    """A stand-in for the module of `architecture`; one before ABI 5 does not say which options it has."""
    found = kernel_table.read(architecture)
    options = {
        "modes": found.modes,
        "pv_formats": found.pv_formats,
        "pv_accumulators": found.pv_accumulators,
        "rotates_by_head": True,
    }
    return SimpleNamespace(
        architecture=architecture,
        version=f"{abi_version}.0.0",
        abi_version=abi_version,
        **(options if abi_version >= 5 else {}),
    )
