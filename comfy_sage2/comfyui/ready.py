"""What ComfyUI's log says of this pack at the start: the GPU, its kernels and their modes, or why none can run."""

from __future__ import annotations

import torch

from .. import __version__
from ..backends.kernels import KERNELS, KernelBackend
from ..call.signature import CallSignature
from ..options import EXACT, MODES, AttentionOptions
from ..system import machine


def ready_line(device: torch.device) -> str:
    """In one line, what the nodes can do on `device`. The kernels are loaded for it, and nothing runs on the GPU."""
    signature = CallSignature.minimal(device, AttentionOptions())
    reasons = {kernel: _reason_against(kernel, signature) for kernel in KERNELS}
    fitting = next((kernel for kernel, reason in reasons.items() if reason is None), None)
    if fitting is None:
        reason = next(iter(reasons.values()))
        return f"version {__version__}: no kernel can run here, so models pass through unchanged: {reason}"
    failure = fitting.availability()
    if failure is not None:
        return f"version {__version__}: the kernels cannot be loaded, so models pass through unchanged: {failure}"
    modes = [mode for mode in MODES if _has_mode(fitting, mode, device)]
    return (
        f"version {__version__} is ready on {machine.device_name(device)} with the kernels {fitting.name} in modes "
        f"{', '.join((*modes, EXACT))}"
    )


def _reason_against(kernel: KernelBackend, signature: CallSignature) -> str | None:
    """Why `kernel` is not for the device of `signature`, or None; its module is not loaded for it."""
    reasons = (constraint.check(signature) for constraint in kernel.constraints)
    return next((reason for reason in reasons if reason is not None), None)


def _has_mode(kernel: KernelBackend, mode: str, device: torch.device) -> bool:
    return kernel.reason_of_module(CallSignature.minimal(device, AttentionOptions(mode))) is None
