"""A backend that is one kernel module: its requirements are data, its calls go through `call_kernels`."""

from __future__ import annotations

import torch

from ..kernels import loader
from .base import AttentionRequest, Backend
from .constraints import HEAD_DIM, LENGTH, MASK_DTYPE, ON_CUDA, accumulator_is, capability_is, mode_is
from .cuda_call import call_kernels


class KernelBackend(Backend):
    """The kernels of one architecture: fp16, bf16 and fp32 tensors, any head_dim up to 256, masks, GQA, LSE."""

    accelerated = True

    def __init__(
        self,
        name: str,
        capabilities: tuple[tuple[int, int], ...],
        modes: tuple[str, ...],
        accumulators: tuple[str, ...],
    ) -> None:
        """`name` is also the architecture of the kernel module; the rest is what that build can do."""
        self.name = name
        self.constraints = (
            ON_CUDA,
            capability_is(*capabilities),
            HEAD_DIM,
            LENGTH,
            MASK_DTYPE,
            mode_is(*modes),
            accumulator_is(*accumulators),
        )

    def reason_against(self, request: AttentionRequest) -> str | None:
        """As for every backend, but the GPU is looked at first: the kernels are loaded only where they can run."""
        for constraint in self.constraints:
            reason = constraint.check(request)
            if reason is not None:
                return reason
        return self.availability(request)

    def availability(self, request: AttentionRequest) -> str | None:
        return loader.reason_unavailable(self.name)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        request: AttentionRequest,
        *,
        scale: float,
        attn_mask: torch.Tensor | None,
        layout: str,
        nonfinite: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Backend.run`."""
        module = loader.load(self.name)
        return call_kernels(
            module, q, k, v, request, scale=scale, attn_mask=attn_mask, layout=layout, nonfinite=nonfinite
        )
