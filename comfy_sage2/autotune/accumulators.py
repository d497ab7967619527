"""Decides the options that the caller leaves at "auto": the mode and pv_accumulator.

GeForce GPUs add up FP8 and fp16 products in FP32 at half the rate of FP16 (NVIDIA's architecture papers of Ampere,
Ada and Blackwell, tables of peak rates). Data-center GPUs do both at one rate, and FP32 is the paper's choice.
INT8 products are summed in INT32, and these sums in FP32: there is no such choice.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import torch

from ..options import AUTO, EXACT, FLOAT_PV, AttentionOptions
from .auto_mode import auto_mode
from .store import choices_of

# The compute capabilities that _GPUS tells apart.
_CAPABILITIES = {(8, 6), (8, 9), (12, 0)}
# A GPU's name in CUDA -> its accumulators. The first match counts; without a match (L4, L40, A10): FP32.
_GPUS = (
    (re.compile(r"Server Edition"), "fp32"),  # RTX PRO in a data center
    (re.compile(r"\b(GeForce|NVIDIA RTX|Quadro RTX|TITAN)\b"), "fp16"),
)


def pv_has_accumulator(pv: str, pv_accumulator: str) -> bool:
    return pv in (AUTO, *FLOAT_PV) or pv_accumulator == "fp32"


def of_gpu(name: str, capability: tuple[int, int]) -> str:
    """The accumulators for a GPU, "fp16" or "fp32"."""
    if capability not in _CAPABILITIES:
        return "fp32"
    return next((accumulator for pattern, accumulator in _GPUS if pattern.search(name)), "fp32")


@lru_cache
def _of_device(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return of_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def resolved(options: AttentionOptions, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionOptions:
    """`options` with mode and accumulators decided where they are "auto": by the times of `device`, if it has any."""
    if options.mode == AUTO:
        options = replace(options, mode=auto_mode(options, device, dtype, head_dim).mode)
    if options.pv_accumulator != AUTO:
        return options
    if options.mode == EXACT:
        return replace(options, pv_accumulator="fp32")
    return replace(options, pv_accumulator=choices_of(device).accumulator(options.mode) or _of_device(device))
