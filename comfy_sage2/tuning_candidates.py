"""The attentions that `autotune` times: every accelerated backend, and the attention of ComfyUI beside them."""

from __future__ import annotations

from functools import partial
from inspect import signature

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import registry
from .autotune.measure import Run
from .autotune.timings import PLAIN, Candidate
from .backends.kernels import KERNELS
from .kernels import loader
from .kernels.errors import KernelUnavailable
from .options import EXACT, MODES, AttentionOptions
from .plan import CallPlan, plan
from .signature import CallSignature

_OPTIONS = (
    *(AttentionOptions(mode, layout="BNHD", pv_accumulator=sums) for mode in MODES for sums in ("fp32", "fp16")),
    AttentionOptions(EXACT, layout="BNHD"),
)
_COMFYUI_ORDER = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
# torch from 2.6 on; before, ComfyUI takes torch's own order.
_BY_PRIORITY = {"set_priority": True} if "set_priority" in signature(sdpa_kernel).parameters else {}


class BackendCandidates:
    """The candidates of `autotune.measure.Candidates` that the registry has."""

    def calls(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[Candidate, Run]:
        """See `Candidates.calls`."""
        found: dict[Candidate, Run] = {Candidate(PLAIN): partial(_plain, q, k, v)}
        for options in _OPTIONS:
            bnhd = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            for backend in registry.backends(options.mode):
                made = plan(CallSignature.of(*bnhd, options, backend=backend.name))
                if backend.accelerated and isinstance(made, CallPlan):
                    found[Candidate(backend.name, options.mode, options.pv_accumulator)] = partial(made.run, *bnhd)
        return found

    def fingerprint(self, capability: tuple[int, int]) -> str:
        """See `Candidates.fingerprint`."""
        return ", ".join(_build(backend.name) for backend in KERNELS if capability in backend.capabilities)


BACKENDS = BackendCandidates()


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As ComfyUI calls it, in its order of preference."""
    with sdpa_kernel(_COMFYUI_ORDER, **_BY_PRIORITY):
        out = scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


def _build(architecture: str) -> str:
    try:
        return loader.fingerprint(architecture)
    except KernelUnavailable:
        return "none"
