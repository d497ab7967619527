"""Requirements that the kernel backends share, each with its reason in words."""

from __future__ import annotations

import torch

from .accumulators import mode_has_accumulator
from .base import AttentionRequest, Constraint

MAX_LENGTH = 2**31 - 256  # token indices are 32-bit in the kernels, offsets 64-bit


def _on_cuda(request: AttentionRequest) -> str | None:
    if request.device_type == "cuda" and torch.version.hip is not None:  # which calls its devices "cuda" too
        return f"[SA-103] the kernels are for NVIDIA GPUs, and this torch is built for ROCm {torch.version.hip}"
    if request.device_type == "cuda":
        return None
    return f"[SA-103] the tensors must be on a CUDA device, got {request.device_type}"


def _length(request: AttentionRequest) -> str | None:
    longest = max(request.q_length, request.kv_length)
    return (
        None if longest <= MAX_LENGTH else f"[SA-203] the sequence must have at most {MAX_LENGTH} tokens, got {longest}"
    )


def _precise(request: AttentionRequest) -> str | None:
    options = request.options
    if not mode_has_accumulator(options.mode, options.pv_accumulator):
        return f"[SA-206] pv_accumulator must be fp32 in mode {options.mode}, got {options.pv_accumulator}"
    if options.mode == "precise" and request.dtype not in (torch.float16, torch.bfloat16):
        return f"[SA-206] mode precise takes float16 and bfloat16 tensors, got {request.dtype}"
    return None


ON_CUDA = Constraint("device", _on_cuda)
LENGTH = Constraint("length", _length)
PRECISE = Constraint("precise", _precise)


# What to use where no kernel of this library fits, by compute capability or its major number. "ComfyUI's own attention"
# is what every node falls back to.
_WITHOUT_KERNELS = {
    (7, 5): "Turing lacks instructions that all these kernels use (cp.async, bf16): use ComfyUI's own attention",
    (8, 7): "Jetson Orin does not run the code for 8.0: use ComfyUI's own attention",
    10: "on these GPUs (B200, B300) the instructions of these kernels are slow: use ComfyUI's own attention",
    11: "on these GPUs (Thor) the instructions of these kernels are slow: use ComfyUI's own attention",
}


def _advice(capability: tuple[int, int]) -> str:
    advice = _WITHOUT_KERNELS.get(capability) or _WITHOUT_KERNELS.get(capability[0])
    return f". {advice}" if advice else ""


def capability_is(*supported: tuple[int, int]) -> Constraint:
    """The GPU's compute capability is one of `supported`."""

    def check(request: AttentionRequest) -> str | None:
        if request.capability in supported:
            return None
        names = " or ".join(f"{major}.{minor}" for major, minor in supported)
        if request.capability is None:
            return f"[SA-103] these kernels need compute capability {names}, got no CUDA device"
        found = "{}.{}".format(*request.capability)
        return f"[SA-103] these kernels need compute capability {names}, got {found}{_advice(request.capability)}"

    return Constraint("compute capability", check)


def capability_from(*least: int) -> Constraint:
    """The GPU's compute capability is `least` or higher."""

    def check(request: AttentionRequest) -> str | None:
        if request.capability is not None and request.capability >= least:
            return None
        found = "no CUDA device" if request.capability is None else "{}.{}".format(*request.capability)
        return "[SA-103] compute capability {}.{} or higher is needed here, got {}".format(*least, found)

    return Constraint("compute capability", check)


def option_is(name: str, *supported: object) -> Constraint:
    """The option called `name` has one of the values `supported`."""

    def check(request: AttentionRequest) -> str | None:
        value = getattr(request.options, name)
        if value in supported:
            return None
        return f"[SA-206] {name} must be {' or '.join(map(str, supported))} here, got {value}"

    return Constraint(name, check)
