"""What a backend is: the plain description of a call, the constraints checked before it, and the call itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..autotune.timings import Work
from ..options import AttentionOptions
from .accumulators import resolved
from .tensors import NO_TENSORS, OptionalTensors

# Ends a call that was prepared; its output and LSE.
Attend = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


class Form(NamedTuple):
    """What calls may have in common: all that decides who can serve them, but for their options.

    Attributes:
        q_shape, k_shape: as BHND.
        mask: shape and dtype of the mask.
    """

    device: torch.device
    dtype: torch.dtype
    q_shape: torch.Size
    k_shape: torch.Size
    mask: tuple[torch.Size, torch.dtype] | None = None
    has_block_mask: bool = False
    has_block_margins: bool = False

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Form:
        """Of q (B, Hq, Nq, D), k (B, Hkv, Nkv, D) as v, and the other tensors, all validated."""
        mask = None if optional.attn_mask is None else (optional.attn_mask.shape, optional.attn_mask.dtype)
        return cls(
            q.device,
            q.dtype,
            q.shape,
            k.shape,
            mask,
            optional.block_mask is not None,
            optional.block_margins is not None,
        )


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class AttentionRequest:
    """One attention call as plain data: all that a constraint may look at. Its options leave nothing open."""

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
    mask_shape: tuple[int, ...] | None  # 4-D, 1 where the mask broadcasts
    mask_dtype: torch.dtype | None
    has_block_mask: bool  # the call has a block mask
    has_block_margins: bool  # the call records block margins
    options: AttentionOptions

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        options: AttentionOptions,
        optional: OptionalTensors = NO_TENSORS,
    ) -> AttentionRequest:
        """Describe a call: q (B, Hq, Nq, D), k (B, Hkv, Nkv, D) as v, and the other tensors, all validated."""
        return cls.of_form(Form.of(q, k, optional), options)

    @classmethod
    def of_form(cls, form: Form, options: AttentionOptions) -> AttentionRequest:
        """As `of`, from what calls of one form have in common."""
        device, mask = form.device, form.mask
        batch, q_heads, q_length, head_dim = form.q_shape
        return cls(
            device_type=device.type,
            device_index=device.index,
            capability=_capability(device) if device.type == "cuda" else None,
            dtype=form.dtype,
            batch=batch,
            q_heads=q_heads,
            kv_heads=form.k_shape[1],
            q_length=q_length,
            kv_length=form.k_shape[2],
            head_dim=head_dim,
            mask_shape=None if mask is None else tuple(mask[0]),
            mask_dtype=None if mask is None else mask[1],
            has_block_mask=form.has_block_mask,
            has_block_margins=form.has_block_margins,
            options=resolved(options, device),
        )

    @classmethod
    def ordinary(cls, device: torch.device, options: AttentionOptions) -> AttentionRequest:
        """A call on `device` that every kernel serves: a reason against it is one against the machine or `options`."""
        shape = torch.Size((1, 8, 1024, 128))
        return cls.of_form(Form(device, torch.float16, shape, shape), options)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        if self.device_index is None:
            return torch.device(self.device_type)
        return torch.device(self.device_type, self.device_index)

    @property
    def work(self) -> Work | None:
        """The call's size, or None where the times of such calls are not known: with masks, block masks or float32."""
        if self.mask_shape is not None or self.has_block_mask or self.dtype == torch.float32:
            return None
        heads = self.batch * self.q_heads
        return Work(heads, self.q_length, self.kv_length, self.head_dim, self.options.is_causal)

    @property
    def scale(self) -> float:
        """The softmax scale, 1/sqrt(head_dim) unless `options` has one."""
        return 1.0 / math.sqrt(self.head_dim) if self.options.scale is None else self.options.scale


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

    def is_for(self, mode: str) -> bool:
        """Whether calls in `mode` are this backend's business; where not, nothing is said about it."""
        return True

    def least_skipped(self, mode: str) -> float:
        """The share of skipped blocks from which on a call with lists takes less time than a dense one in `mode`."""
        return 0.0

    def availability(self) -> str | None:
        """Why this backend cannot work on this machine at all (kernel, driver), or None."""
        return None

    def reason_against(self, request: AttentionRequest) -> str | None:
        """The first reason why this backend cannot run `request`, or None when it can.

        The constraints come first, so that kernels are loaded only for a GPU that can run them.
        """
        for constraint in self.constraints:
            reason = constraint.check(request)
            if reason is not None:
                return reason
        return self.availability()

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        request: AttentionRequest,
        optional: OptionalTensors = NO_TENSORS,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention; inputs are never written to.

        Args:
            q: (B, Hq, Nq, D) view in any memory order, last dimension contiguous.
            k, v: (B, Hkv, Nkv, D), likewise.
            request: the description of this call, for which `reason_against` returned None, with its options.
            optional: the call's other tensors. `flag_nonfinite` and `BlockMask.flag_invalid` set the flags for any
                output and any lists.

        Returns:
            out of shape (B, Hq, Nq, D) and q's dtype, made by `empty_output` in the layout of the options, and lse
            (B, Hq, Nq) float32 when they ask for it, else None.
        """

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        request: AttentionRequest,
        optional: OptionalTensors = NO_TENSORS,
    ) -> Attend | None:
        """Begin a call without block mask and margins, for a caller who then lets go of q, k and v; else as for `run`.

        Returns:
            what ends the call, once and on the same stream, with the results of `run`; it keeps those of q, k and v
            that it still reads, and raises RuntimeError for a failure of the device alone, such as lacking memory for
            the output. None when the call is for `run`: nothing was done.
        """
        return None


def flag_nonfinite(out: torch.Tensor, nonfinite: torch.Tensor) -> None:
    """Set the int32 `nonfinite` to 1 when `out` holds NaN or infinity; nobody waits for the device.

    The largest magnitude is NaN or infinite exactly when some value is: a sum could overflow.
    """
    largest = torch.linalg.vector_norm(out, math.inf)
    nonfinite.bitwise_or_(largest.isfinite().logical_not())


def empty_output(q: torch.Tensor, layout: str) -> torch.Tensor:
    """An uninitialized output of q's shape (B, Hq, Nq, D), contiguous in memory as `layout` says."""
    batch, heads, length, head_dim = q.shape
    if layout == "BNHD":
        return q.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return q.new_empty((batch, heads, length, head_dim))
