"""Quantized attention kernels of one GPU architecture.

Importing needs neither torch nor an NVIDIA driver: the driver is looked up by the first call.
"""

import lzma
from pathlib import Path

from . import _C
from ._C import (
    BlockScorePlan,
    Plan,
    abi_version,
    architecture,
    block_lists,
    block_score_plan,
    capabilities,
    driver_version,
    minimum_driver,
    minimum_driver_version,
    modes,
    plan,
    pv_accumulators,
    pv_formats,
    target,
    toolchain,
    version,
)

__all__ = [
    "BlockScorePlan",
    "Plan",
    "abi_version",
    "architecture",
    "block_lists",
    "block_score_plan",
    "capabilities",
    "driver_version",
    "minimum_driver",
    "minimum_driver_version",
    "modes",
    "plan",
    "pv_accumulators",
    "pv_formats",
    "target",
    "toolchain",
    "version",
]

# Wheels hold their images packed, development builds as the compiler writes them.
for _path in sorted(Path(__file__).parent.glob("*.cubin*")):
    _image = _path.read_bytes()
    _C.add_cubin(_path.name.partition(".")[0], lzma.decompress(_image) if _path.suffix == ".xz" else _image)
