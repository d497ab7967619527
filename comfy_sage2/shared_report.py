"""What `doctor --share` writes: a GPU, its driver, versions, kernels and measured times, as JSON.

Nothing in it tells whose machine it is.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch

from . import __version__, machine, registry
from .autotune.measure import measure_now
from .kernels import loader
from .tuning_candidates import BACKENDS

_DRIVER_FIELDS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")

# A folder in an error message may hold a user's name: of an absolute path only the last part is kept. Separators may be
# of either kind, and doubled where a message quotes a path; a name in between may hold blanks, but not at its ends.
_FOLDERS = re.compile(
    r"""(?<![\w.:/\\])(?:[A-Za-z]:)?[/\\]+(?:[^\s'"/\\:*?<>|](?:[^'"/\\:*?<>|\r\n]*[^\s'"/\\:*?<>|])?[/\\]+)+"""
)


def _home() -> re.Pattern[str]:
    """The user's own folder in every spelling: Windows knows no case, and takes either separator."""
    parts = [re.escape(part) for part in re.split(r"[/\\]+", str(Path.home())) if part]
    # A home of "/" has no name to hide.
    return re.compile(r"[/\\]*" + r"[/\\]+".join(parts) + r"(?!\w)" if parts else r"(?!)", re.IGNORECASE)


def without_folders(value: Any) -> Any:
    """A JSON value in which the absolute paths of all texts are reduced to their last part."""
    if isinstance(value, str):
        return _FOLDERS.sub("", _home().sub("", value))
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return value


def gpu_name(machine: dict[str, Any]) -> str:
    """The GPU's name for file names: letters, digits and hyphens, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")


def write(document: dict[str, Any], path: Path) -> None:
    """Write the document. OSError when that is not possible."""
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def share(index: int, report: str) -> Path:
    """Measure GPU `index` and write it, with the doctor's report, into the current folder; the file's path.

    OSError when it cannot be written.
    """
    document: dict[str, Any] = without_folders(describe(index) | {"doctor": report.splitlines()})
    path = Path(f"comfy-sage2-{gpu_name(document)}.json")
    write(document, path)
    return path.resolve()


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
        "measured": _measured(index),
        "kernels": {backend.name: _kernel(backend.name) for backend in registry.kernels()},
    }


def _measured(index: int) -> dict[str, Any]:
    """The times from which the nodes choose, measured now, and what follows from them; or why there are none."""
    try:
        choices = measure_now(index, BACKENDS)
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
