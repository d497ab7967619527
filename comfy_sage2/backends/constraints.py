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


ON_CUDA = Constraint("device", _on_cuda)
LENGTH = Constraint("length", _length)


def capability_is(*supported: tuple[int, int]) -> Constraint:
    """The GPU's compute capability is one of `supported`."""

    def check(request: AttentionRequest) -> str | None:
        if request.capability in supported:
            return None
        names = " or ".join(f"{major}.{minor}" for major, minor in supported)
        found = "no CUDA device" if request.capability is None else "{}.{}".format(*request.capability)
        return f"these kernels need compute capability {names}, got {found}"

    return Constraint("compute capability", check)


def option_is(name: str, *supported: object) -> Constraint:
    """The option called `name` has one of the values `supported`."""

    def check(request: AttentionRequest) -> str | None:
        value = getattr(request.options, name)
        if value in supported:
            return None
        return f"{name} must be {' or '.join(map(str, supported))} here, got {value}"

    return Constraint(name, check)
