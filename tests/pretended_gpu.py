"""Signatures of calls on GPUs that the machine does not have."""

from __future__ import annotations

import torch

from comfy_sage2.block_mask import blocks_of
from comfy_sage2.call.signature import ANYONE, CallSignature, TensorForm
from comfy_sage2.options import AttentionOptions

CUDA = torch.device("cuda", 0)


def on_gpu(
    capability: tuple[int, int],
    options: AttentionOptions,
    *,
    device: torch.device = CUDA,
    dtype: torch.dtype = torch.float16,
    batch: int = 1,
    q_heads: int = 8,
    kv_heads: int = 8,
    q_length: int = 1024,
    kv_length: int = 1024,
    head_dim: int = 128,
    mask_shape: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype = torch.bool,
    has_block_mask: bool = False,
) -> CallSignature:
    """The signature of a call on a GPU of this capability; without a capability when `device` is no GPU."""
    kind = type("OnGpu", (CallSignature,), {"capability": capability if device.type == "cuda" else None})

    def form(shape: tuple[int, ...], dtype: torch.dtype) -> TensorForm:
        return TensorForm.contiguous(torch.Size(shape), dtype, device)

    def qkv(heads: int, length: int) -> TensorForm:
        bhnd = options.layout == "BHND"
        return form((batch, heads, length, head_dim) if bhnd else (batch, length, heads, head_dim), dtype)

    lists = (batch, q_heads, blocks_of(q_length), 1 + blocks_of(kv_length))
    signature: CallSignature = kind(
        options,
        ANYONE,
        qkv(q_heads, q_length),
        qkv(kv_heads, kv_length),
        qkv(kv_heads, kv_length),
        None if mask_shape is None else form(mask_shape, mask_dtype),
        form(lists, torch.int16) if has_block_mask else None,
    )
    return signature
