"""Quantized attention kernels of one GPU architecture.

Importing needs neither torch nor an NVIDIA driver: the driver is looked up by the first call.
"""

from pathlib import Path

from . import _C
from ._C import (
    abi_version,
    architecture,
    attention,
    driver_version,
    minimum_driver_version,
    target,
    toolchain,
    version,
    workspace_bytes,
)

__all__ = [
    "abi_version",
    "architecture",
    "attention",
    "driver_version",
    "minimum_driver_version",
    "target",
    "toolchain",
    "version",
    "workspace_bytes",
]

for _image in sorted(Path(__file__).parent.glob("*.cubin")):
    _C.add_cubin(_image.stem, _image.read_bytes())
