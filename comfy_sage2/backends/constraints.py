"""Requirements that the kernel backends share, each with its reason in words."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..call.signature import CallSignature
from .base import Constraint

MAX_LENGTH = 2**31 - 256  # token indices are 32-bit in the kernels, offsets 64-bit

# What to use without kernels. ComfyUI's own attention is what every node falls back to.
_OWN = "use ComfyUI's own attention"
_OWN_OR_KITCHEN = f"{_OWN} or comfy-kitchen's INT8 (--use-ck-attention)"
_EXACT_OR_OWN = "use mode exact or ComfyUI's own attention"


def on_cuda(signature: CallSignature) -> str | None:
    if signature.device.type == "cuda" and torch.version.hip is not None:  # ROCm calls its devices "cuda" too
        build = f"this torch is built for ROCm {torch.version.hip}"
        return f"[SA-103] the kernels are for NVIDIA GPUs, and {build}: {_OWN_OR_KITCHEN}"
    if signature.device.type == "cuda":
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        cause = f"the kernels need an NVIDIA GPU, and this torch ({torch.__version__}) is built without CUDA"
        return f"[SA-103] {cause}: install a torch with CUDA if this machine has such a GPU, else {_OWN}"
    return f"[SA-103] the kernels need an NVIDIA GPU, and the tensors are on {signature.device.type}: {_OWN}"


def precise(signature: CallSignature) -> str | None:
    if signature.options.mode == "precise" and signature.dtype not in (torch.float16, torch.bfloat16):
        return f"[SA-206] mode precise takes float16 and bfloat16 tensors, got {signature.dtype}"
    return None


def requires(holds: Callable[[CallSignature], bool], reason: str) -> Constraint:
    """`holds` must be true of the call. `reason` says why a call is refused; "{call.…}" in it quotes that call."""
    return lambda call: None if holds(call) else reason.format(call=call)


ON_GPU = requires(  # AMD's included
    lambda call: call.device.type == "cuda",
    "[SA-103] a GPU with CUDA or ROCm is needed here, and the tensors are on {call.device.type}",
)
LENGTH = requires(
    lambda call: max(call.q_length, call.kv_length) <= MAX_LENGTH,
    f"[SA-203] q and k must have at most {MAX_LENGTH} tokens, got {{call.q_length}} and {{call.kv_length}}",
)
DENSE = requires(
    lambda call: call.block_mask is None,
    "[SA-212] only the kernels and the slow reference take block masks: leave out `block_mask` here",
)
NO_MASK = requires(lambda call: call.attn_mask is None, "[SA-206] it takes no mask")
SQUARE_IF_CAUSAL = requires(
    lambda call: not call.options.is_causal or call.q_length == call.kv_length,
    "[SA-206] it takes is_causal only with as many keys as queries, got {call.q_length} and {call.kv_length}",
)
IN_16_BITS = requires(
    lambda call: call.dtype in (torch.float16, torch.bfloat16),
    "[SA-206] it takes float16 or bfloat16, got {call.dtype}",
)
EQUAL_HEADS = requires(
    lambda call: call.q_heads == call.kv_heads,
    "[SA-206] it takes q and k of equally many heads, got {call.q_heads} and {call.kv_heads}",
)

# Why a GPU has no kernels here and what to use on it, by compute capability or its major number. _FIRST stands for all
# lower major numbers too, _LAST for all higher ones.
_FIRST, _LAST = 7, 13
_WITHOUT_KERNELS: dict[tuple[int, int] | int, str] = {
    (7, 5): f"Turing lacks instructions that all kernels use (cp.async, bf16): {_OWN_OR_KITCHEN}",
    (8, 7): f"Jetson Orin does not run the code for 8.0: {_EXACT_OR_OWN}",
    _FIRST: f"GPUs before Ampere lack instructions that all kernels use: {_OWN}",
    10: f"the kernels' instructions are slow on these GPUs (B200, B300): {_EXACT_OR_OWN}",
    11: f"the kernels' instructions are slow on these GPUs (Thor): {_EXACT_OR_OWN}",
    _LAST: f"this GPU is newer than this version of the pack: update the pack, or {_EXACT_OR_OWN}",
}


def capability_is(*supported: tuple[int, int]) -> Constraint:
    def check(signature: CallSignature) -> str | None:
        if signature.capability in supported:
            return None
        names = " or ".join(f"{major}.{minor}" for major, minor in supported)
        if signature.capability is None:
            return f"[SA-103] these kernels need compute capability {names}, got no CUDA device"
        capability = "{}.{}".format(*signature.capability)
        major = min(max(signature.capability[0], _FIRST), _LAST)
        reason = _WITHOUT_KERNELS.get(signature.capability) or _WITHOUT_KERNELS.get(major)
        if reason is not None:  # the same text for every kernel module, so that a list of reasons has it once
            return f"[SA-103] there are no kernels for compute capability {capability}: {reason}"
        return f"[SA-103] these kernels need compute capability {names}, got {capability}"

    return check


def capability_from(*least: int) -> Constraint:
    """The compute capability of an NVIDIA GPU is `least` or higher."""

    def check(signature: CallSignature) -> str | None:
        if torch.version.hip is not None:  # ROCm numbers its GPUs differently
            return None
        if signature.capability is not None and signature.capability >= least:
            return None
        device = "no CUDA device" if signature.capability is None else "{}.{}".format(*signature.capability)
        return "[SA-103] compute capability {}.{} or higher is needed here, got {}".format(*least, device)

    return check


def option_is(name: str, *supported: object) -> Constraint:
    def check(signature: CallSignature) -> str | None:
        value = getattr(signature.options, name)
        if value in supported:
            return None
        return f"[SA-206] {name} must be {' or '.join(map(str, supported))} here, got {value}"

    return check


def dense(*modes: str) -> tuple[Constraint, ...]:
    """Constraints to calls in these modes without a block mask."""
    return option_is("mode", *modes), LENGTH, DENSE
