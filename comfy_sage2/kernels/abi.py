"""Whether a kernel module and this library mean the same by the fields of a call."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

# kAbiVersion of csrc/attention_call.h, and the major number of csrc/VERSION.
ABI_VERSION = 5
# Modules from this one on are called: what came later is an optional field, which calls that need it alone have.
OLDEST_ABI = 3
NEEDED = f"ABI {OLDEST_ABI} to {ABI_VERSION}"
_BLOCK_MASKS = _PHASES = _BLOCK_MARGINS = 4  # the first ABI that has them
_PLANS = _OPTIONS = 5
# The options of modules before that, which do not name them, by architecture; and those of the others.
_OLDER_MODES = {"sm120": ("8b", "precise")}, ("8b", "4b", "precise")
_OLDER_FORMATS = {"sm80": ("fp16",)}, ("fp8",)
_OLDER_ACCUMULATORS = {"sm90": ("fp32",)}, ("fp32", "fp16")
# What is asked of a module before its first call.
_MEMBERS = ("driver_version", "minimum_driver_version", "target")


def describe(module: ModuleType) -> str:
    """A module's version and ABI, in words."""
    return f"version {getattr(module, 'version', 'unknown')}, ABI {getattr(module, 'abi_version', 'unknown')}"


def reason_against_images(images_abi: object, host: ModuleType) -> str | None:
    """Why the launch code of `host` cannot be that of images for this ABI, or None."""
    host_abi = getattr(host, "abi_version", None)
    if images_abi == host_abi:
        return None
    return f"they are for ABI {images_abi}, the launch code has ABI {host_abi or 'unknown'}"


def reason_against(module: ModuleType, architecture: str) -> str | None:
    """Why this library cannot call `module` as the kernels of `architecture`, or None."""
    found = getattr(module, "architecture", None)
    if found != architecture:
        return f"it is not a module of {architecture} kernels"
    abi = getattr(module, "abi_version", None)
    if not isinstance(abi, int) or not OLDEST_ABI <= abi <= ABI_VERSION:
        return f"its ABI is {'unknown' if abi is None else abi}, this comfy_sage2 needs {NEEDED}"
    missing = [member for member in _MEMBERS if not hasattr(module, member)]
    return f"it lacks {', '.join(missing)}" if missing else None


def has_block_masks(module: ModuleType) -> bool:
    """Whether calls of `module` may have a block mask."""
    return bool(module.abi_version >= _BLOCK_MASKS)


def has_phases(module: ModuleType) -> bool:
    """Whether calls of `module` can be enqueued in two phases."""
    return bool(module.abi_version >= _PHASES)


def has_block_margins(module: ModuleType) -> bool:
    """Whether calls of `module` may record block margins."""
    return bool(module.abi_version >= _BLOCK_MARGINS)


def modes(module: ModuleType) -> tuple[str, ...]:
    """The values of `AttentionOptions.mode` that `module` has kernels for."""
    return _options(module, "modes", *_OLDER_MODES)


def pv_accumulators(module: ModuleType) -> tuple[str, ...]:
    """The values of `AttentionOptions.pv_accumulator`, likewise."""
    return _options(module, "pv_accumulators", *_OLDER_ACCUMULATORS)


def pv_formats(module: ModuleType) -> tuple[str, ...]:
    """The values of `AttentionOptions.pv` for the quantizing modes, likewise, the one for "auto" first."""
    return _options(module, "pv_formats", *_OLDER_FORMATS)


def precise_accumulators(module: ModuleType) -> tuple[str, ...]:
    """The accumulators of mode "precise", which older modules have in FP32 alone."""
    return pv_accumulators(module) if module.abi_version >= _OPTIONS else ("fp32",)


def _options(
    module: ModuleType, name: str, older: Mapping[str, tuple[str, ...]], others: tuple[str, ...]
) -> tuple[str, ...]:
    if module.abi_version >= _OPTIONS:
        return tuple(getattr(module, name))
    return older.get(module.architecture, others)


def has_plans(module: ModuleType) -> bool:
    """Whether `module` plans a call once for all of its signature (`backends.module_plan.ModulePlan`)."""
    return bool(module.abi_version >= _PLANS)


def rotates_by_head(module: ModuleType) -> bool:
    """Whether `module` can rotate those heads alone that gain by it; others rotate all heads or none."""
    return bool(getattr(module, "rotates_by_head", False))  # earlier modules of ABI 5 refuse the field


def has_block_selection(module: ModuleType) -> bool:
    """Whether `module` scores key blocks and makes lists of them."""
    return hasattr(module, "block_score_plan")  # modules of 5.0.0 have not


def has_pooled_tail(module: ModuleType) -> bool:
    """Whether `module` adds the tail of calls with block lists, and has the scores that choose best for it."""
    return hasattr(module, "pooled_tail_plan")
