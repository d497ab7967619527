"""The launch code of comfy-sage2's attention kernels, for the device images of every architecture.

Importing needs neither torch nor an NVIDIA driver. The distributions comfy-sage2-sm90 and so on hold the images.
"""

import importlib.metadata
import json
import lzma
from pathlib import Path

from ._C import BlockScorePlan, Kernels, Plan, PooledTailPlan, abi_version, launch_interfaces, toolchain

__all__ = [
    "BlockScorePlan",
    "Kernels",
    "Plan",
    "PooledTailPlan",
    "abi_version",
    "launch_interfaces",
    "load",
    "toolchain",
    "version_of",
]


def load(folder: Path) -> Kernels:
    """The kernels whose images lie in `folder`, with what their build says of them.

    Wheels hold their images packed, development builds as the compiler writes them. ValueError for images that this
    launch code does not fit.
    """
    kernels = Kernels(**json.loads((folder / "build.json").read_text()))
    for path in sorted(folder.glob("*.cubin*")):
        image = path.read_bytes()
        kernels.add_cubin(path.name.partition(".")[0], lzma.decompress(image) if path.suffix == ".xz" else image)
    return kernels


def version_of(folder: Path) -> str:
    """The version of the distribution whose package `folder` is; "development" for one that was not installed."""
    name = folder.name.replace("_", "-")
    installed = importlib.metadata.distributions(name=name, path=[str(folder.parent)])
    return next((distribution.version for distribution in installed), "development")
