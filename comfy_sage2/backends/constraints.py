"""Requirements that the kernel backends share, each with its reason in words."""

from __future__ import annotations

import torch

from ..autotune.accumulators import mode_has_accumulator
from ..call.signature import CallSignature
from .base import Constraint

MAX_LENGTH = 2**31 - 256  # token indices are 32-bit in the kernels, offsets 64-bit


# What to use without kernels. ComfyUI's own attention is what every node falls back to.
_OWN = "use ComfyUI's own attention"
_OWN_OR_KITCHEN = f"{_OWN} or comfy-kitchen's INT8 (--use-ck-attention)"
_EXACT_OR_OWN = "use mode exact or ComfyUI's own attention"


def _on_cuda(signature: CallSignature) -> str | None:
    if signature.device.type == "cuda" and torch.version.hip is not None:  # which calls its devices "cuda" too
        build = f"this torch is built for ROCm {torch.version.hip}"
        return f"[SA-103] the kernels are for NVIDIA GPUs, and {build}: {_OWN_OR_KITCHEN}"
    if signature.device.type == "cuda":
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        build = f"this torch ({torch.__version__}) is built without CUDA"
        return f"[SA-103] the kernels need an NVIDIA GPU, and {build}: install a torch with CUDA, or {_OWN}"
    return f"[SA-103] the kernels need an NVIDIA GPU, and the tensors are on {signature.device.type}: {_OWN}"


def _length(signature: CallSignature) -> str | None:
    longest = max(signature.q_length, signature.kv_length)
    return (
        None if longest <= MAX_LENGTH else f"[SA-203] the sequence must have at most {MAX_LENGTH} tokens, got {longest}"
    )


def _precise(signature: CallSignature) -> str | None:
    options = signature.options
    if not mode_has_accumulator(options.mode, options.pv_accumulator):
        return f"[SA-206] pv_accumulator must be fp32 in mode {options.mode}, got {options.pv_accumulator}"
    if options.mode == "precise" and signature.dtype not in (torch.float16, torch.bfloat16):
        return f"[SA-206] mode precise takes float16 and bfloat16 tensors, got {signature.dtype}"
    return None


_NO_BLOCK_MASK = "[SA-212] only the kernels and the slow reference take block masks: leave out `block_mask` here"

ON_CUDA = Constraint("device", _on_cuda)
LENGTH = Constraint("length", _length)
PRECISE = Constraint("precise", _precise)
DENSE = Constraint("block_mask", lambda signature: _NO_BLOCK_MASK if signature.block_mask is not None else None)


# Why a GPU has no kernels here and what to use on it, by compute capability or its major number; the first and the last
# of these numbers stand for those beyond them too.
_FIRST, _LAST = 7, 13
_WITHOUT_KERNELS: dict[tuple[int, int] | int, str] = {
    (7, 5): f"Turing lacks instructions that all of them use (cp.async, bf16): {_OWN_OR_KITCHEN}",
    (8, 7): f"Jetson Orin does not run the code for 8.0: {_EXACT_OR_OWN}",
    _FIRST: f"GPUs before Ampere lack instructions that all of them use: {_OWN}",
    10: f"their instructions are slow on these GPUs (B200, B300): {_EXACT_OR_OWN}",
    11: f"their instructions are slow on these GPUs (Thor): {_EXACT_OR_OWN}",
    _LAST: f"this GPU is newer than this version of the pack: update the pack, or {_EXACT_OR_OWN}",
}


def _without_kernels(capability: tuple[int, int]) -> str | None:
    """Why there are no kernels for a GPU and what to use on it; None where there are, or nothing is known of it."""
    major = min(max(capability[0], _FIRST), _LAST)
    return _WITHOUT_KERNELS.get(capability) or _WITHOUT_KERNELS.get(major)


def capability_is(*supported: tuple[int, int]) -> Constraint:
    """The GPU's compute capability is one of `supported`."""

    def check(signature: CallSignature) -> str | None:
        if signature.capability in supported:
            return None
        names = " or ".join(f"{major}.{minor}" for major, minor in supported)
        if signature.capability is None:
            return f"[SA-103] these kernels need compute capability {names}, got no CUDA device"
        capability = "{}.{}".format(*signature.capability)
        reason = _without_kernels(signature.capability)
        if reason is not None:  # in the same words for every kernel module, so that a list of reasons has them once
            return f"[SA-103] there are no kernels for compute capability {capability}: {reason}"
        return f"[SA-103] these kernels need compute capability {names}, got {capability}"

    return Constraint("compute capability", check)


def capability_from(*least: int) -> Constraint:
    """The GPU's compute capability is `least` or higher."""

    def check(signature: CallSignature) -> str | None:
        if signature.capability is not None and signature.capability >= least:
            return None
        device = "no CUDA device" if signature.capability is None else "{}.{}".format(*signature.capability)
        return "[SA-103] compute capability {}.{} or higher is needed here, got {}".format(*least, device)

    return Constraint("compute capability", check)


def option_is(name: str, *supported: object) -> Constraint:
    """The option called `name` has one of the values `supported`."""

    def check(signature: CallSignature) -> str | None:
        value = getattr(signature.options, name)
        if value in supported:
            return None
        return f"[SA-206] {name} must be {' or '.join(map(str, supported))} here, got {value}"

    return Constraint(name, check)
