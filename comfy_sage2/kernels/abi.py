"""Whether a kernel module and this library mean the same by the fields of a call."""

from __future__ import annotations

from types import ModuleType

from .errors import shortened

# kAbiVersion of csrc/attention_call.h, and the major number of csrc/VERSION.
ABI_VERSION = 5
NEEDED = f"ABI {ABI_VERSION}"
# What is asked of a module. Development builds before 5.1.0 lack some.
_MEMBERS = (
    "driver_version",
    "minimum_driver_version",
    "target",
    "modes",
    "pv_accumulators",
    "pv_formats",
    "plan",
    "block_score_plan",
    "block_lists",
    "pooled_tail_plan",
    "rotates_by_head",
)


def describe(module: ModuleType) -> str:
    """A module's version and ABI, in words."""
    return f"version {getattr(module, 'version', 'unknown')}, ABI {getattr(module, 'abi_version', 'unknown')}"


def reason_against_images(images_abi: object, host: ModuleType) -> str | None:
    """Why the launch code of `host` cannot be that of images for this ABI, or None."""
    host_abi = getattr(host, "abi_version", None)
    if images_abi == host_abi:
        return None
    return f"they are for ABI {shortened(str(images_abi))}, the launch code has ABI {host_abi or 'unknown'}"


def reason_against(module: ModuleType, architecture: str) -> str | None:
    """Why this library cannot call `module` as the kernels of `architecture`, or None."""
    found = getattr(module, "architecture", None)
    if found != architecture:
        return f"it is not a module of {architecture} kernels"
    abi = getattr(module, "abi_version", None)
    if abi != ABI_VERSION:
        return f"its ABI is {'unknown' if abi is None else abi}, this comfy_sage2 needs {NEEDED}"
    missing = [member for member in _MEMBERS if not hasattr(module, member)]
    return f"it lacks {', '.join(missing)}" if missing else None
