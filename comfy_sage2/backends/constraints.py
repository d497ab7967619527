"""Requirements that the kernel backends share, each with its reason in words."""

from __future__ import annotations

import torch

from .base import AttentionRequest, Constraint

MAX_LENGTH = 2**31 - 256  # token indices are 32-bit in the kernels, offsets 64-bit


def _on_cuda(request: AttentionRequest) -> str | None:
    if request.device_type == "cuda" and torch.version.hip is not None:  # which calls its devices "cuda" too
        return f"the kernels are for NVIDIA GPUs, and this torch is built for ROCm {torch.version.hip}"
    if request.device_type == "cuda":
        return None
    return f"the tensors must be on a CUDA device, got {request.device_type}"


def _length(request: AttentionRequest) -> str | None:
    longest = max(request.q_length, request.kv_length)
    return None if longest <= MAX_LENGTH else f"the sequence must have at most {MAX_LENGTH} tokens, got {longest}"


def _head_dim(request: AttentionRequest) -> str | None:
    return None if request.head_dim <= 256 else f"head_dim must be at most 256, got {request.head_dim}"


def _mask_dtype(request: AttentionRequest) -> str | None:
    supported = (None, torch.bool, torch.float16, torch.bfloat16, torch.float32)
    if request.mask_dtype in supported:
        return None
    return f"the mask must be bool, float16, bfloat16 or float32, got {request.mask_dtype}"


ON_CUDA = Constraint("device", _on_cuda)
LENGTH = Constraint("length", _length)
HEAD_DIM = Constraint("head_dim", _head_dim)
MASK_DTYPE = Constraint("mask", _mask_dtype)


def capability_is(*supported: tuple[int, int]) -> Constraint:
    """The GPU's compute capability is one of `supported`."""

    def check(request: AttentionRequest) -> str | None:
        if request.capability in supported:
            return None
        names = " or ".join(f"{major}.{minor}" for major, minor in supported)
        found = "no CUDA device" if request.capability is None else "{}.{}".format(*request.capability)
        return f"these kernels need compute capability {names}, got {found}"

    return Constraint("compute capability", check)


def accumulator_is(*supported: str) -> Constraint:
    """The accumulator of P V is one of `supported`."""

    def check(request: AttentionRequest) -> str | None:
        if request.pv_accumulator in supported:
            return None
        return f"pv_accumulator must be {' or '.join(supported)} here, got {request.pv_accumulator}"

    return Constraint("pv_accumulator", check)


def mode_is(*supported: str) -> Constraint:
    """The mode (bits of Q and K) is one of `supported`."""

    def check(request: AttentionRequest) -> str | None:
        if request.mode in supported:
            return None
        return f"mode must be {' or '.join(supported)} here, got {request.mode}"

    return Constraint("mode", check)
