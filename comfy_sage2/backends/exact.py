"""Torch's exact attentions as backends of mode "exact". They round in 16 bits as ComfyUI's attention does.

They are called as operators of their own: `torch.nn.attention.sdpa_kernel` sets flags of the whole process, and
ComfyUI drives each GPU from its own thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ..call.signature import CallSignature
from ..call.tensors import OptionalTensors, mask_4d
from ..options import EXACT
from . import constraints as rules
from .base import Backend, BoundCall, BoundTensors, Constraint, Result, empty_output, flag_nonfinite
from .readable import readable

_CUDNN, _FLASH, _EFFICIENT = "cuDNN's attention", "torch's flash attention", "torch's memory-efficient attention"
_BIAS_MULTIPLE = 16  # elements: a row of a mask begins at a multiple of them

# q, k, v padded to what the operator reads, the mask as an additive bias or None, and the signature -> what it returns:
# the output, the LSE (at least as many rows as q, if the options ask for it), and other things.
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, CallSignature], Any]


class ExactAttention(Backend):
    """One of torch's fused attentions."""

    accelerated = True

    def __init__(
        self, name: str, compute: Compute, availability: Callable[[], str | None], *constraints: Constraint
    ) -> None:
        self.name = name
        self._compute = compute
        self._availability = availability
        self.constraints = (*rules.dense_on_cuda(EXACT), _ONE_KIND_OF_MASK, *constraints)

    def is_for(self, mode: str) -> bool:
        return mode == EXACT

    def availability(self) -> str | None:
        return self._availability()

    def bind(self, signature: CallSignature) -> BoundCall:
        return ExactCall(signature, self._compute)


class ExactCall(BoundTensors):
    def __init__(self, signature: CallSignature, operator: Compute) -> None:
        super().__init__(signature)
        self._operator = operator

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Result:
        assert optional.block_mask is None  # by DENSE
        signature = self._signature
        mask = mask_4d(optional.attn_mask)
        bias = None if mask is None else _bias(mask, q.dtype, signature.kv_length)
        out, lse, *_ = self._operator(readable(q), readable(k), readable(v), bias, signature)
        out = out[..., : signature.head_dim]
        has_lse = signature.options.return_lse
        lse = lse.reshape(*q.shape[:2], -1)[..., : signature.q_length].contiguous() if has_lse else None
        if mask is not None:
            closed = closed_rows(mask)
            out.masked_fill_(closed[..., None], 0.0)
            if lse is not None:
                lse.masked_fill_(closed, -math.inf)
        dense = out.transpose(1, 2) if signature.options.layout == "BNHD" else out
        if not dense.is_contiguous():
            out = empty_output(q, signature.options.layout).copy_(out)
        if optional.nonfinite is not None:
            flag_nonfinite(out, optional.nonfinite)
        return out, lse


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


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, signature: CallSignature
) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, signature.options.is_causal, scale=signature.scale
    )


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, signature: CallSignature
) -> Any:
    if bias is not None:
        bias = bias.expand(signature.batch, signature.q_heads, signature.q_length, signature.kv_length)
    options = signature.options
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, options.return_lse, 0.0, options.is_causal, scale=signature.scale
    )


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, signature: CallSignature
) -> Any:
    options = signature.options
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias, options.return_lse, 0.0, options.is_causal, False, scale=signature.scale
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


_ONE_KIND_OF_MASK = Constraint("mask", _one_kind_of_mask)
_AMPERE = rules.capability_from(8, 0)

# In the order that suits most GPUs before anything is measured.
EXACT_ATTENTIONS = (
    ExactAttention(
        "torch-cudnn",
        _cudnn,
        _cudnn_availability,
        _AMPERE,
        rules.in_16_bits(_CUDNN),
        rules.requires(
            "head_dim",
            lambda call: call.head_dim <= 128,
            f"[SA-206] {_CUDNN} takes a head_dim of at most 128, got {{call.head_dim}}",
        ),
        rules.requires(  # cuDNN has no graph for a single one
            "tokens",
            lambda call: min(call.q_length, call.kv_length) > 1,
            f"[SA-206] {_CUDNN} needs more than one query and key",
        ),
        rules.equal_heads(_CUDNN),
        rules.square_if_causal(_CUDNN),
    ),
    ExactAttention(
        "torch-flash",
        _flash,
        _flash_availability,
        _AMPERE,
        rules.in_16_bits(_FLASH),
        rules.no_mask(_FLASH),
        rules.square_if_causal(_FLASH),
    ),
    ExactAttention("torch-efficient", _efficient, lambda: None, _AMPERE, rules.equal_heads(_EFFICIENT)),
)
