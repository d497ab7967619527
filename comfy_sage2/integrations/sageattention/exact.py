"""Calls of `sageattention` that no kernel takes: torch computes them, in any form that it takes, with gradients."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import dropout

from ...options import AttentionOptions
from ..torch_attention import CallTensors, is_special

# torch's own: in torch.nn.functional another pack's may stand, which calls `sageattn` and so would come back here.
_scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
_MOST_SCORES = 1 << 24  # at once where the LSE is asked for: 64 MB in float32


def torchs_attention(
    inputs: CallTensors, options: AttentionOptions, scale: float | None, dropout_p: float = 0.0
) -> torch.Tensor:
    """The output of torch's attention, contiguous in the layout of the options, as that of the kernels is."""
    q, k, v, mask = _in_torchs_layout(inputs, options)
    if mask is not None and not is_special(mask):
        mask = _with_rows(mask)
        if mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        if options.is_causal:
            mask = _below_the_diagonal(mask, q, k)
    out: torch.Tensor = _scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=options.is_causal and mask is None,
        scale=scale,
        enable_gqa=True if _group_size(q, k) > 1 else False,  # noqa: SIM210  # of symbolic sizes it is no bool
    )
    if options.layout == "BNHD":
        out = out.transpose(1, 2)
    return out if out.is_nested else out.contiguous()


def plain_attention(
    inputs: CallTensors, options: AttentionOptions, scale: float | None, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in plain torch, some rows at a time; computed in float32, float64 for float64.

    The LSE is float32, of q's shape (B, H, N) without the channels. A row that attends to nothing gives zeros and -inf.

    Raises:
        TypeError: tensors of which torch alone knows what they hold.
    """
    for name, tensor in zip(("q", "k", "v", "attn_mask"), inputs, strict=True):
        if tensor is not None and is_special(tensor):
            kind = f"{type(tensor).__name__} of layout {tensor.layout}"
            raise TypeError(f"[SA-201] with return_lse {name} must be a plain dense tensor with values, got a {kind}")
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(inputs.q.device.type, enabled=False):
        out, lse = _computed(inputs, options, scale, dropout_p)
    return out.contiguous(), lse.float()


def _computed(
    inputs: CallTensors, options: AttentionOptions, scale: float | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, mask = _in_torchs_layout(inputs, options)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if (size := _group_size(q, k)) > 1:
        k, v = (tensor.repeat_interleave(size, dim=-3) for tensor in (k, v))
    keys, values = k.to(dtype).transpose(-2, -1), v.to(dtype)
    if options.is_causal:
        mask = _below_the_diagonal(mask, q, k)
    mask = None if mask is None else _with_rows(mask)
    step = max(_MOST_SCORES // max(math.prod(q.shape[:-2]) * k.shape[-2], 1), 1)
    outs, lses = [], []
    for start in range(0, max(q.shape[-2], 1), step):
        scores = (q[..., start : start + step, :].to(dtype) * scale) @ keys
        if mask is not None:
            rows = mask if mask.shape[-2] == 1 else mask[..., start : start + step, :]
            scores = scores.masked_fill(~rows, -math.inf) if rows.dtype == torch.bool else scores + rows.to(dtype)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        outs.append(dropout(weights, dropout_p) @ values)
        lses.append(lse)
    out, lse = torch.cat(outs, dim=-2).to(q.dtype), torch.cat(lses, dim=-1)
    out = out.transpose(1, 2) if options.layout == "BNHD" else out
    return out, lse


def _with_rows(mask: torch.Tensor) -> torch.Tensor:
    """`mask` with at least two dimensions, which some of torch's attentions need."""
    while mask.dim() < 2:
        mask = mask[None]
    return mask


def _group_size(q: torch.Tensor, k: torch.Tensor) -> int:
    """How many heads of q share one of k; 1 too where one head of q is for all of them."""
    if q.dim() < 3 or k.dim() < 3:
        return 1
    q_heads, kv_heads = q.size(-3), k.size(-3)  # nested tensors have no shape
    return q_heads // kv_heads if kv_heads and q_heads % kv_heads == 0 else 1


def _in_torchs_layout(inputs: CallTensors, options: AttentionOptions) -> CallTensors:
    if options.layout == "BHND":
        return inputs
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    return CallTensors(q, k, v, inputs.mask)


def _below_the_diagonal(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`mask`, or a mask of all scores, without what `is_causal` hides."""
    attended = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return attended
    return mask & attended if mask.dtype == torch.bool else mask.masked_fill(~attended, -math.inf)
