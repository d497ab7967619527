"""An attention call as plain data in the terms of the algorithm: what the constraints of backends look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from .accumulators import resolved
from .autotune.timings import Work
from .options import AUTO, AttentionOptions
from .signature import CallSignature, TensorForm


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class AttentionRequest:
    """One attention call as plain data: all that a constraint may look at.

    Its options leave nothing open but `pv`, which the backend that serves the call decides (`Backend.settled`).
    """

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
    has_block_mask: bool  # the call has block masks
    options: AttentionOptions
    heads_first: bool = False  # in memory the tokens of a head of q lie together, else the heads of a token
    accumulator_is_open: bool = False  # the caller's is "auto": a backend may take another than that of `options`

    @classmethod
    def of(cls, signature: CallSignature) -> AttentionRequest:
        """Describe a call whose signature is valid (`validation.check_call`)."""
        q, k, mask = signature.q, signature.k, signature.attn_mask
        heads, tokens = (signature.layout.index(axis) for axis in "HN")
        device = q.device
        return cls(
            device_type=device.type,
            device_index=device.index,
            capability=_capability(device) if device.type == "cuda" else None,
            dtype=q.dtype,
            batch=q.shape[0],
            q_heads=q.shape[heads],
            kv_heads=k.shape[heads],
            q_length=q.shape[tokens],
            kv_length=k.shape[tokens],
            head_dim=q.shape[3],
            mask_shape=None if mask is None else (1,) * (4 - len(mask.shape)) + tuple(mask.shape),
            mask_dtype=None if mask is None else mask.dtype,
            has_block_mask=signature.block_mask is not None,
            options=resolved(signature.options, device, q.dtype, q.shape[3]),
            heads_first=bool(q.stride) and q.stride[heads] > q.stride[tokens],
            accumulator_is_open=signature.options.pv_accumulator == AUTO,
        )

    @classmethod
    def minimal(cls, device: torch.device, options: AttentionOptions) -> AttentionRequest:
        """A minimal call that every kernel supports.

        If a backend refuses it, the cause is the machine or `options`, not the shape.
        """
        batch, length, heads, head_dim = 1, 1024, 8, 128
        form = TensorForm(torch.Size((batch, length, heads, head_dim)), (), torch.float16, device)
        form = form if options.layout == "BNHD" else form._replace(shape=torch.Size((batch, heads, length, head_dim)))
        return cls.of(CallSignature(options, None, False, False, form, form, form))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        if self.device_index is None:
            return torch.device(self.device_type)
        return torch.device(self.device_type, self.device_index)

    @property
    def work(self) -> Work | None:
        """What the call's time depends on; None where that is not known.

        That is with block masks, in float32, and with masks that differ between queries or heads.
        """
        mask = self.mask_shape
        if self.has_block_mask or self.dtype == torch.float32 or (mask is not None and mask[1:3] != (1, 1)):
            return None
        return Work(
            self.batch * self.q_heads,
            self.q_length,
            self.kv_length,
            self.head_dim,
            self.options.is_causal,
            self.heads_first,
            mask is not None,
        )

    @property
    def scale(self) -> float:
        """The softmax scale, 1/sqrt(head_dim) unless `options` has one."""
        return 1.0 / math.sqrt(self.head_dim) if self.options.scale is None else self.options.scale
