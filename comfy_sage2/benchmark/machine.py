"""What a result depends on: the GPU, the driver, versions and kernels. Nothing that tells whose machine it is."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from .. import __version__, machine, registry
from ..autotune.measure import measure_now
from ..kernels import loader
from ..tuning_candidates import BACKENDS

_DRIVER_FIELDS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")


def describe() -> dict[str, Any]:
    """The current CUDA device and the software on it, ready for JSON."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
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
        "measured": _measured(),
        "kernels": {backend.name: _kernel(backend.name) for backend in registry.kernels()},
    }


def _measured() -> dict[str, Any]:
    """The times from which the nodes choose, measured now, and what follows from them; or why there are none."""
    try:
        choices = measure_now(torch.cuda.current_device(), BACKENDS)
    except RuntimeError as error:
        return {"unavailable": str(error)}
    return {**choices.times.document(), "table": choices.lines()}


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
    folder = Path(str(module.__file__)).parent
    cubins = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.cubin"))))
    return about | {"wheel": "installed in Python or a development build", "sha256_of_cubins": cubins.hexdigest()}
