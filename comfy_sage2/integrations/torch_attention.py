"""Calls in the form of torch's scaled_dot_product_attention: which of them a plan can serve, and in what shape."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..call.tensors import overrides_torch
from ..dispatch.operators import needs_derivative, run_by_the_compiler

HAS_DROPOUT = "[SA-602] dropout_p is not 0, and quantized attention has no dropout"
NEEDS_DERIVATIVE = "[SA-307] the call needs gradients, and quantized attention has none: use torch.no_grad()"
IS_SPECIAL = "[SA-201] q, k and v must be plain dense tensors, got nested ones or another class"
DO_NOT_FIT = (
    "[SA-201] q, k and v must be of 2 or more dimensions with one batch size and head_dim, k and v of one shape, and "
    "q's head count a multiple of theirs"
)


class CallTensors(NamedTuple):
    """The tensors of a call, of shapes (…, N, D), and a mask (bool or additive) or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None


def autocast(inputs: CallTensors) -> CallTensors:
    """Cast the tensors as torch's attention does: under autocast, those of 16 or 32 bits to its dtype."""
    dtype = _autocast_dtype(inputs.q.device.type)
    if dtype is None:
        return inputs
    q, k, v, mask = inputs
    cast_mask = mask if mask is None else _cast(mask, dtype)
    return CallTensors(_cast(q, dtype), _cast(k, dtype), _cast(v, dtype), cast_mask)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if overrides_torch(tensor) or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return tensor
    return tensor.to(dtype)


def _autocast_dtype(device: str) -> torch.dtype | None:
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


# The compiler of torch 2.11 and earlier cannot trace this function; a graph guards on the state of autocast anyway.
run_by_the_compiler(_autocast_dtype)


def reason_for_torch(inputs: CallTensors, dropout_p: float) -> str | None:
    """Why no machine can have a plan for the call; None if one may."""
    tensors = [tensor for tensor in inputs if tensor is not None]
    if any(map(is_special, tensors)):
        return IS_SPECIAL
    if dropout_p != 0:
        return HAS_DROPOUT
    return NEEDS_DERIVATIVE if needs_derivative(*tensors) else None


def is_special(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is no plain array in memory, so that only torch can handle it."""
    if overrides_torch(tensor) or tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        return True
    if torch.compiler.is_compiling() or type(tensor) is torch.Tensor:
        return False
    dispatch = type(tensor).__torch_dispatch__
    return dispatch is not torch.Tensor.__torch_dispatch__ and not isinstance(tensor, torch._subclasses.FakeTensor)


def fitted(inputs: CallTensors, dropout_p: float, layout: str = "BHND") -> CallTensors | str:
    """The call in the shape that plans take, or why torch has to compute it.

    That is (B, H, N, D), or an unchanged `layout`. (N, D) has one head, (H, N, D) one batch entry; all dimensions
    before the heads become the batch.
    """
    reason = reason_for_torch(inputs, dropout_p)
    if reason is not None:
        return reason
    q, k, v, mask = inputs
    if not 2 <= q.dim() == k.dim() == v.dim() or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        return DO_NOT_FIT
    if layout != "BHND" and q.dim() != 4:
        return DO_NOT_FIT
    if q.dim() != 4:
        if q.shape[:-3] != k.shape[:-3] or (mask is not None and mask.dim() > min(q.dim(), 3)):
            return DO_NOT_FIT
        if not q.numel() or not k.numel():  # nothing says how many batches there are
            return DO_NOT_FIT
        if q.dim() == 2:
            q, k, v = q[None], k[None], v[None]
        q, k, v = (tensor.reshape(-1, *tensor.shape[-3:]) for tensor in (q, k, v))
    heads = layout.index("H")
    if q.dim() != 4 or q.shape[0] != k.shape[0] or not k.shape[heads] or q.shape[heads] % k.shape[heads]:
        return DO_NOT_FIT
    return CallTensors(q, k, v, mask)
