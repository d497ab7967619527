"""The GPU of a measurement, its driver and the software on it, as plain values."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import torch

from comfy_sage2 import __version__, machine, registry
from comfy_sage2.kernels import loader

_DRIVER_FIELDS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")


def short_name(about: dict[str, Any]) -> str:
    """The GPU's name for file names: letters, digits and hyphens, such as h200."""
    return re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-").removeprefix("nvidia-")


def without_home(text: str) -> str:
    """`text` with "~" for the user's home folder: results are published."""
    return text.replace(str(Path.home()), "~")


def describe(index: int) -> dict[str, Any]:
    """CUDA device `index` and the software on it, ready for JSON."""
    properties = torch.cuda.get_device_properties(index)
    return {
        "comfy_sage2": __version__,
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": _driver(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "kernels": {backend.name: _kernel(backend.name) for backend in registry.kernels()},
    }


def _cudnn() -> int | str | None:
    """cuDNN's version, or what torch says of one that it cannot use: everything else can be measured without it."""
    try:
        version: int | None = torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error)
    return version


def _driver() -> dict[str, str]:
    found = machine.nvidia_smi(_DRIVER_FIELDS)
    if not found:
        return {"unknown": "nvidia-smi does not run"}
    # Only what is the same on all GPUs is sure.
    return {name: " or ".join(sorted({gpu[name] for gpu in found})) for name in _DRIVER_FIELDS}


def _kernel(architecture: str) -> dict[str, str]:
    """Version, target and origin of an architecture's kernels, with hashes; or why there are none."""
    reason = loader.reason_unavailable(architecture)
    if reason is not None:
        return {"unavailable": reason}
    module = loader.load(architecture)
    about = {"version": module.version, "target": module.target, "toolchain": module.toolchain}
    wheels = loader.bundled_wheels(architecture)
    if wheels:
        return about | {
            "wheel": ", ".join(wheel.path.name for wheel in wheels),
            "sha256": ", ".join(wheel.sha256 for wheel in wheels),
        }
    return about | {"wheel": "installed in Python or a development build"}
