"""Whether a kernel module and this library mean the same by the fields of a call."""

from __future__ import annotations

from types import ModuleType

# kAbiVersion of csrc/attention_call.h, the major number of csrc/VERSION; and that of the wheels, which may be older.
ABI_VERSIONS = (5, 6)
NEEDED = " or ".join(f"ABI {number}" for number in ABI_VERSIONS)


def describe(module: ModuleType) -> str:
    """A module's version and ABI, in words."""
    return f"version {getattr(module, 'version', 'unknown')}, ABI {getattr(module, 'abi_version', 'unknown')}"


def reason_against(module: ModuleType, architecture: str) -> str | None:
    """Why this library cannot call `module` as the kernels of `architecture`, or None."""
    if getattr(module, "architecture", None) != architecture:
        return f"it is not a module of {architecture} kernels"
    abi = getattr(module, "abi_version", "unknown")
    return None if abi in ABI_VERSIONS else f"its ABI is {abi}, this comfy_sage2 needs {NEEDED}"
