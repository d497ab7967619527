"""What a backend is: the plain description of a call, the constraints checked before it, and the call itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class AttentionRequest:
    """One attention call as plain data: all that a constraint may look at."""

    device_type: str
    device_index: int | None
    capability: tuple[int, int] | None  # CUDA compute capability, None on other devices
    dtype: torch.dtype
    batch: int
    q_heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    mode: str  # "8b" or "4b": bits of Q and K
    smooth_v: bool
    is_causal: bool
    scale: float  # softmax scale, already resolved
    mask_shape: tuple[int, ...] | None  # 4-D, 1 where the mask broadcasts
    mask_dtype: torch.dtype | None
    return_lse: bool
    pv_accumulator: str  # "fp32" or "fp16"

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        mode: str = "8b",
        smooth_v: bool = False,
        is_causal: bool = False,
        attn_mask: torch.Tensor | None = None,
        return_lse: bool = False,
        pv_accumulator: str = "fp32",
    ) -> AttentionRequest:
        """Describe a call: q (B, Hq, Nq, D), k and v (B, Hkv, Nkv, D), attn_mask 4-D or None, all validated."""
        on_cuda = q.device.type == "cuda"
        batch, q_heads, q_length, head_dim = q.shape
        _, kv_heads, kv_length, _ = v.shape
        return cls(
            device_type=q.device.type,
            device_index=q.device.index,
            capability=_capability(q.device) if on_cuda else None,
            dtype=q.dtype,
            batch=batch,
            q_heads=q_heads,
            kv_heads=kv_heads,
            q_length=q_length,
            kv_length=kv_length,
            head_dim=head_dim,
            mode=mode,
            smooth_v=smooth_v,
            is_causal=is_causal,
            scale=scale,
            mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
            mask_dtype=None if attn_mask is None else attn_mask.dtype,
            return_lse=return_lse,
            pv_accumulator=pv_accumulator,
        )


@dataclass(frozen=True)
class Constraint:
    """A named requirement; `check` returns None when it holds, else the reason in words for the user."""

    name: str
    check: Callable[[AttentionRequest], str | None]


class Backend(ABC):
    """One way to compute the attention. Subclasses set the three attributes and implement `run`."""

    name: str
    accelerated: bool  # faster than plain attention: a candidate when the caller names no backend
    constraints: tuple[Constraint, ...] = ()

    def availability(self, request: AttentionRequest) -> str | None:
        """Why this backend cannot work on this machine at all (kernel, driver), or None."""
        return None

    def reason_against(self, request: AttentionRequest) -> str | None:
        """The first reason why this backend cannot run `request`, or None when it can."""
        unavailable = self.availability(request)
        if unavailable is not None:
            return unavailable
        for constraint in self.constraints:
            reason = constraint.check(request)
            if reason is not None:
                return reason
        return None

    @abstractmethod
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
        """Compute the attention; inputs are never written to.

        Args:
            q: (B, Hq, Nq, D) view in any memory order, last dimension contiguous.
            k, v: (B, Hkv, Nkv, D), likewise.
            request: the description of this call, for which `reason_against` returned None.
            scale: softmax scale.
            attn_mask: None or 4-D (size 1 where it broadcasts), bool (True = attend) or additive float.
            layout: memory order of the output, "BHND" or "BNHD".
            nonfinite: None, or one int32 on q's device that becomes 1 when a value of the output is NaN or infinite and
                else stays as it is; the host is not made to wait. `note_nonfinite` does it for any output.

        Returns:
            out of shape (B, Hq, Nq, D) and q's dtype, made by `empty_output`, and lse (B, Hq, Nq) float32 when
            `request.return_lse`, else None.
        """


def note_nonfinite(out: torch.Tensor, nonfinite: torch.Tensor) -> None:
    """Set the int32 `nonfinite` to 1 when `out` holds NaN or infinity; nobody waits for the device.

    The largest magnitude is NaN or infinite exactly when some value is: a sum could overflow.
    """
    largest = torch.linalg.vector_norm(out, math.inf)
    nonfinite.bitwise_or_(largest.isfinite().logical_not())


def empty_output(q: torch.Tensor, layout: str) -> torch.Tensor:
    """An uninitialised output of q's shape (B, Hq, Nq, D), contiguous in memory as `layout` says."""
    batch, heads, length, head_dim = q.shape
    if layout == "BNHD":
        return q.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return q.new_empty((batch, heads, length, head_dim))
