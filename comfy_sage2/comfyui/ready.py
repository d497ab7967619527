"""What ComfyUI's log says about this pack at startup: the GPU, its kernels and their modes, or why none can run."""

from __future__ import annotations

import torch

from .. import __version__
from ..backends.kernels import KERNELS
from ..call.signature import CallSignature
from ..options import EXACT, MODES, AttentionOptions
from ..system import machine


def ready_line(device: torch.device) -> str:
    """One line on what the nodes can do on `device`. This loads the kernels, and runs nothing on the GPU."""
    signature = CallSignature.minimal(device, AttentionOptions())
    reasons = {kernel: kernel.reason_of_constraints(signature) for kernel in KERNELS}
    fitting = next((kernel for kernel, reason in reasons.items() if reason is None), None)
    if fitting is None:
        reason = next(iter(reasons.values()))
        return f"version {__version__}: no kernel can run here: {reason}"
    failure = fitting.availability()
    if failure is not None:
        return f"version {__version__}: the kernels cannot be loaded: {failure}"
    calls = {mode: CallSignature.minimal(device, AttentionOptions(mode)) for mode in MODES}
    modes = [mode for mode, call in calls.items() if fitting.reason_of_module(call) is None]
    return (
        f"version {__version__} is ready on {machine.device_name(device)} with the kernels {fitting.name} in modes "
        f"{', '.join((*modes, EXACT))}"
    )
