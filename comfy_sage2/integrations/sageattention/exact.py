"""Calls of `sageattention` that no kernel takes: torch computes them, in any form that it accepts, with gradients."""

from __future__ import annotations

import math

import torch

from ...options import AttentionOptions
from ...reference.exact import exact_attention, group_size
from ..torch_attention import CallTensors, is_special

# torch's own: a pack may have replaced the one in torch.nn.functional with a function that calls `sageattn` again.
_scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention


def torchs_attention(
    inputs: CallTensors, options: AttentionOptions, scale: float | None, dropout_p: float = 0.0
) -> torch.Tensor:
    """The output of torch's attention, contiguous in the layout of the options, like that of the kernels."""
    q, k, v, mask = _in_torchs_layout(inputs, options)
    if mask is not None and not is_special(mask):
        mask = torch.atleast_2d(mask)  # which some of torch's attentions need
        if mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        if options.is_causal:
            shown = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            mask = mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, -math.inf)
    out: torch.Tensor = _scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=options.is_causal and mask is None,
        scale=scale,
        enable_gqa=True if group_size(q, k) > 1 else False,  # noqa: SIM210  # with symbolic sizes the comparison is no bool
    )
    if options.layout == "BNHD":
        out = out.transpose(1, 2)
    return out if out.is_nested else out.contiguous()


def plain_attention(
    inputs: CallTensors, options: AttentionOptions, scale: float | None, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE (B, H, N) in plain torch, in float32 (float64 for float64); 0 and -inf for fully masked rows.

    TypeError: a tensor whose values only torch can read.
    """
    for name, tensor in zip(("q", "k", "v", "attn_mask"), inputs, strict=True):
        if tensor is not None and is_special(tensor):
            kind = f"{type(tensor).__name__} of layout {tensor.layout}"
            raise TypeError(f"[SA-201] with return_lse {name} must be a plain dense tensor with values, got a {kind}")
    q, k, v, mask = _in_torchs_layout(inputs, options)
    out, lse = exact_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=options.is_causal,
        attn_mask=None if mask is None else torch.atleast_2d(mask),
        dropout_p=dropout_p,
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    out = out.transpose(1, 2) if options.layout == "BNHD" else out
    return out.to(q.dtype).contiguous(), lse.float()


def _in_torchs_layout(inputs: CallTensors, options: AttentionOptions) -> CallTensors:
    if options.layout == "BHND":
        return inputs
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    return CallTensors(q, k, v, inputs.mask)
