"""Quantized attention kernels of one GPU architecture.

Importing needs neither torch nor an NVIDIA driver: the driver is looked up by the first call. The launch code is that
of the distribution comfy-sage2-host.
"""

from pathlib import Path

from comfy_sage2_host import BlockScorePlan, Plan, PooledTailPlan, load, version_of

_folder = Path(__file__).parent
_kernels = load(_folder)
version = version_of(_folder)
abi_version = _kernels.abi_version
architecture = _kernels.architecture
block_lists = _kernels.block_lists
block_score_plan = _kernels.block_score_plan
capabilities = _kernels.capabilities
chosen_cuts = _kernels.chosen_cuts
driver_version = _kernels.driver_version
least_sliced_tokens = _kernels.least_sliced_tokens
minimum_driver = _kernels.minimum_driver
minimum_driver_version = _kernels.minimum_driver_version
modes = _kernels.modes
plan = _kernels.plan
pooled_tail_plan = _kernels.pooled_tail_plan
pv_accumulators = _kernels.pv_accumulators
pv_formats = _kernels.pv_formats
row_errors = _kernels.row_errors
row_sample = _kernels.row_sample
slice_multiple = _kernels.slice_multiple
target = _kernels.target
toolchain = _kernels.toolchain

__all__ = [
    "BlockScorePlan",
    "Plan",
    "PooledTailPlan",
    "abi_version",
    "architecture",
    "block_lists",
    "block_score_plan",
    "capabilities",
    "chosen_cuts",
    "driver_version",
    "least_sliced_tokens",
    "minimum_driver",
    "minimum_driver_version",
    "modes",
    "plan",
    "pooled_tail_plan",
    "pv_accumulators",
    "pv_formats",
    "row_errors",
    "row_sample",
    "slice_multiple",
    "target",
    "toolchain",
    "version",
]
