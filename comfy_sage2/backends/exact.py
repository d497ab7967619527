"""Torch's exact attentions as backends of mode "exact". They round in 16 bits as ComfyUI's attention does.

They call torch's operators directly: `torch.nn.attention.sdpa_kernel` sets flags of the whole process, but ComfyUI
drives each GPU from its own thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..call.signature import CallSignature, TensorForm
from ..call.tensors import NO_TENSORS, OptionalTensors, mask_4d
from ..options import EXACT
from . import constraints as rules
from .base import Backend, BoundCall, Constraint, Result, empty_output, flag_nonfinite
from .readable import ALIGNMENT, is_readable, readable

_BIAS_MULTIPLE = 16  # elements: each row of a mask starts at a multiple of this

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Takes q, k, v padded to what the operator reads, the mask as an additive bias or None, and the signature. Returns the
# output, the LSE (of at least as many rows as q, if the options ask for it), and other things.
Operator = Callable[[Inputs, torch.Tensor | None, CallSignature], Any]


class ExactAttention(Backend):
    """One of torch's fused attentions."""

    accelerated = True

    def __init__(
        self, name: str, operator: Operator, availability: Callable[[], str | None], *constraints: Constraint
    ) -> None:
        self.name = name
        self._operator = operator
        self._availability = availability
        self.constraints = (rules.on_cuda, *rules.dense(EXACT), _one_kind_of_mask, *constraints)

    def is_for(self, mode: str) -> bool:
        return mode == EXACT

    def availability(self) -> str | None:
        return self._availability()

    def bind(self, signature: CallSignature) -> BoundCall:
        return ExactCall(signature, self._operator)


class ExactCall(BoundCall):
    takes_reshaped = True

    def __init__(self, signature: CallSignature, operator: Operator) -> None:
        # Set the scale: the operators would derive it from the padded head_dim.
        self._signature = signature._replace(options=replace(signature.options, scale=signature.scale))
        self._operator = operator
        self._is_bhnd = signature.layout == "BHND"
        self._has_lse = signature.options.return_lse
        self._views = tuple(self._bhnd(form.shape, form.stride) for form in (signature.q, signature.k, signature.v))
        self._are_readable = is_readable(signature.q) and is_readable(signature.k) and is_readable(signature.v)
        contiguous = TensorForm.contiguous(signature.q.shape, signature.dtype, signature.device)
        self._out_shape, self._out_stride = self._bhnd(contiguous.shape, contiguous.stride)

    def _bhnd(self, shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        order = (0, 1, 2, 3) if self._is_bhnd else (0, 2, 1, 3)
        return tuple(shape[axis] for axis in order), tuple(stride[axis] for axis in order)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        out, lse = self._compute(q, k, v, optional)
        return out if self._is_bhnd else out.transpose(1, 2), lse

    def run_reshaped(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors, out_shape: Sequence[int]
    ) -> torch.Tensor:
        return self.run(q, k, v, optional)[0].view(out_shape)

    def _compute(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output (B, H, N, D) and LSE, of tensors of any shape (`run_reshaped`); each view takes one step, not two."""
        are_readable = self._are_readable and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0
        q_view, k_view, v_view = self._views
        q, k, v = q.as_strided(*q_view), k.as_strided(*k_view), v.as_strided(*v_view)
        if not are_readable:
            q, k, v = readable(q), readable(k), readable(v)
        mask = mask_4d(optional.attn_mask)
        bias = None if mask is None else _bias(mask, self._signature.dtype, self._signature.kv_length)
        results = self._operator((q, k, v), bias, self._signature)
        out: torch.Tensor = results[0]
        if out.stride() == self._out_stride and mask is None and not self._has_lse and optional.nonfinite is None:
            return out, None  # nearly all calls end here
        return self._finished(out, results[1], mask, optional.nonfinite)

    def _finished(
        self, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None, nonfinite: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = out[..., : self._signature.head_dim]
        row_lse: torch.Tensor | None = None
        if self._has_lse:
            row_lse = lse.reshape(*self._out_shape[:2], -1)[..., : self._signature.q_length].contiguous()
        if mask is not None:
            closed = closed_rows(mask)
            out.masked_fill_(closed[..., None], 0.0)
            if row_lse is not None:
                row_lse.masked_fill_(closed, -math.inf)
        if not (out if self._is_bhnd else out.transpose(1, 2)).is_contiguous():
            out = empty_output(out, self._signature.layout).copy_(out)
        if nonfinite is not None:
            flag_nonfinite(out, nonfinite)
        return out, row_lse


def _bias(mask: torch.Tensor, dtype: torch.dtype, kv_length: int) -> torch.Tensor:
    """The mask (…, Nkv | 1) as an additive bias (…, Nkv) of `dtype`, whose rows are aligned."""
    size = (*mask.shape[:3], kv_length)
    missing = -kv_length % _BIAS_MULTIPLE
    bias = torch.zeros((*size[:3], kv_length + missing), dtype=dtype, device=mask.device)[..., :kv_length]
    if mask.dtype == torch.bool:
        return bias.masked_fill_(mask.logical_not(), -math.inf)
    return bias.copy_(mask)


def closed_rows(mask: torch.Tensor) -> torch.Tensor:
    """(B | 1, H | 1, Nq | 1) bool: the queries that attend to nothing."""
    attended = mask if mask.dtype == torch.bool else mask > -math.inf
    return attended.any(dim=3).logical_not()


def _flash(qkv: Inputs, bias: torch.Tensor | None, call: CallSignature) -> Any:
    return torch._scaled_dot_product_flash_attention(*qkv, 0.0, call.options.is_causal, scale=call.options.scale)


def _efficient(qkv: Inputs, bias: torch.Tensor | None, call: CallSignature) -> Any:
    if bias is not None:
        bias = bias.expand(call.batch, call.q_heads, call.q_length, call.kv_length)
    options = call.options
    return torch._scaled_dot_product_efficient_attention(
        *qkv, bias, options.return_lse, 0.0, options.is_causal, scale=options.scale
    )


def _cudnn(qkv: Inputs, bias: torch.Tensor | None, call: CallSignature) -> Any:
    options = call.options
    return torch._scaled_dot_product_cudnn_attention(
        *qkv, bias, options.return_lse, 0.0, options.is_causal, False, scale=options.scale
    )


def _one_kind_of_mask(signature: CallSignature) -> str | None:
    if signature.mask_shape is None:
        return None
    if signature.options.is_causal:
        return "[SA-206] torch's exact attentions take a mask or is_causal, got both"
    if signature.mask_dtype not in (torch.bool, signature.dtype):
        return f"[SA-206] torch's exact attentions take a mask of bool or {signature.dtype}, got {signature.mask_dtype}"
    return None


@lru_cache
def _flash_availability() -> str | None:
    if torch.backends.cuda.is_flash_attention_available():
        return None
    return "[SA-112] this torch is built without flash attention"


@lru_cache
def _cudnn_availability() -> str | None:
    try:
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    except RuntimeError as error:
        return f"[SA-112] cuDNN cannot be used: {error}"
    if version is not None and version >= 90000:
        return None
    return f"[SA-112] cuDNN 9 is needed for its attention, got {version or 'none'}"


_AMPERE = rules.capability_from(8, 0)

# The order until a GPU is measured; it suits most GPUs.
EXACT_ATTENTIONS = (
    ExactAttention(
        "torch-cudnn",
        _cudnn,
        _cudnn_availability,
        _AMPERE,
        rules.IN_16_BITS,
        rules.requires(
            lambda call: call.head_dim <= 128,
            "[SA-206] it takes a head_dim of at most 128, got {call.head_dim}",
        ),
        rules.requires(  # cuDNN has no graph for a single query or key
            lambda call: min(call.q_length, call.kv_length) > 1,
            "[SA-206] it needs more than one query and key",
        ),
        rules.EQUAL_HEADS,
        rules.SQUARE_IF_CAUSAL,
    ),
    ExactAttention(
        "torch-flash", _flash, _flash_availability, _AMPERE, rules.IN_16_BITS, rules.NO_MASK, rules.SQUARE_IF_CAUSAL
    ),
    ExactAttention("torch-efficient", _efficient, lambda: None, _AMPERE, rules.EQUAL_HEADS),
)
