"""Checks on the arguments of the attention call: each message names the argument, what is expected and what came.

They check the forms of tensors, not their values, and so run once for all calls of one signature.
"""

from __future__ import annotations

import torch

from ..block_mask import BLOCK_TOKENS, blocks_of
from ..options import AUTO, EXACT, GIVEN
from .signature import CallSignature, TensorForm
from .tensors import OptionalTensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MASK_DTYPES = (torch.bool, *DTYPES)
MAX_HEAD_DIM = 256

_Target = tuple[int, int, int, int]  # batch, q_heads, q_length, kv_length


def check_call(signature: CallSignature) -> None:
    """Raise TypeError for wrong dtypes, ValueError for anything else that is wrong whatever the backend."""
    q, k = signature.q, signature.k
    _check_tensors(q, k, signature.v, signature.layout)
    target = (signature.batch, signature.q_heads, signature.q_length, signature.kv_length)
    if signature.attn_mask is not None:
        _check_mask(signature.attn_mask, target, q.device)
    if signature.block_mask is not None:
        _check_block_mask(signature.block_mask, target, q.device)
    _check_rotated_heads(signature)


def _check_tensors(q: TensorForm, k: TensorForm, v: TensorForm, layout: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        rank, shape = len(tensor.shape), tuple(tensor.shape)
        if rank != 4:
            raise ValueError(f"[SA-201] {name} must have 4 dimensions ({layout}), got {rank}: shape {shape}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"[SA-201] {name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if 0 in tensor.shape:
            raise ValueError(f"[SA-201] {name} must not be empty, got shape {shape} ({layout})")
        if tensor.stride[3] != 1 and tensor.shape[3] > 1:
            raise ValueError(
                f"[SA-201] {name} must be contiguous in its last dimension (stride 1), got stride {tensor.stride[3]}; "
                f"call {name}.contiguous() first"
            )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"[SA-201] {name} must have q's dtype {q.dtype}, got {tensor.dtype}; cast it with {name}.to(q.dtype)"
            )
        if tensor.device != q.device:
            raise ValueError(f"[SA-201] {name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"[SA-201] {name} must have q's batch size {q.shape[0]}, got {tensor.shape[0]}")
        if tensor.shape[3] != q.shape[3]:
            raise ValueError(f"[SA-201] {name} must have q's head_dim {q.shape[3]}, got {tensor.shape[3]}")
    if v.shape != k.shape:
        raise ValueError(f"[SA-201] v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if q.shape[3] > MAX_HEAD_DIM:
        raise ValueError(f"[SA-202] head_dim must be from 1 to {MAX_HEAD_DIM}, got {q.shape[3]}")
    heads = layout.index("H")
    if q.shape[heads] % k.shape[heads] != 0:
        raise ValueError(
            f"[SA-201] q's head count must be a multiple of that of k and v ({k.shape[heads]}), got {q.shape[heads]} "
            f"(layout {layout})"
        )


def check_flags(optional: OptionalTensors, device: torch.device) -> None:
    """Check the flags that a call sets, each one int32 on `device`: TypeError for the dtype, else ValueError."""
    for name, flag in (("nonfinite", optional.nonfinite), ("block_mask.invalid", optional.invalid_blocks)):
        if flag is None:
            continue
        if flag.dtype != torch.int32:
            raise TypeError(f"[SA-209] {name} must be an int32 tensor, got {flag.dtype}")
        if flag.numel() != 1 or flag.device != device:
            raise ValueError(
                f"[SA-209] {name} must be one element on q's device {device}, got shape {tuple(flag.shape)} on "
                f"{flag.device}"
            )


def _check_rotated_heads(signature: CallSignature) -> None:
    """Check that the flags of rotated heads fit the call and its option `rotate`."""
    rotate, flags = signature.options.rotate, signature.rotated_heads
    if flags is None:
        if rotate == GIVEN:
            raise ValueError("[SA-213] rotated_heads must be a tensor with rotate='given', got None")
        return
    if rotate not in (GIVEN, AUTO):
        raise ValueError(f"[SA-213] rotated_heads must be None with rotate={rotate!r}, got a tensor")
    if signature.options.mode == EXACT:
        raise ValueError("[SA-213] rotated_heads must be None in mode 'exact', which rotates nothing, got a tensor")
    if flags.dtype != torch.int32:
        raise TypeError(f"[SA-213] rotated_heads must be an int32 tensor, got {flags.dtype}")
    expected = TensorForm.contiguous(torch.Size((signature.batch, signature.kv_heads)), torch.int32, signature.device)
    if flags.shape != expected.shape or flags.device != expected.device:
        raise ValueError(
            f"[SA-213] rotated_heads must be of shape (batch, kv_heads) = {tuple(expected.shape)} on q's device "
            f"{expected.device}, got {tuple(flags.shape)} on {flags.device}"
        )
    if any(
        size > 1 and step != dense for size, step, dense in zip(flags.shape, flags.stride, expected.stride, strict=True)
    ):
        raise ValueError(f"[SA-213] rotated_heads must be contiguous, got strides {flags.stride}")


def _check_mask(mask: TensorForm, target: _Target, device: torch.device) -> None:
    if mask.dtype not in MASK_DTYPES:
        raise TypeError(
            "[SA-204] attn_mask must be bool (True = attend) or an additive float16, bfloat16 or float32, got "
            f"{mask.dtype}"
        )
    if mask.device != device:
        raise ValueError(f"[SA-204] attn_mask must be on q's device {device}, got {mask.device}")
    rank = len(mask.shape)
    if not 2 <= rank <= 4:
        raise ValueError(f"[SA-204] attn_mask must have 2 to 4 dimensions, got {rank}: shape {tuple(mask.shape)}")
    padded = (1,) * (4 - rank) + tuple(mask.shape)
    if any(size not in (1, expected) for size, expected in zip(padded, target, strict=True)):
        raise ValueError(
            f"[SA-204] attn_mask must broadcast to (batch, q_heads, q_length, kv_length) = {tuple(target)}, "
            f"got shape {tuple(mask.shape)}"
        )


def _check_block_mask(lists: TensorForm, target: _Target, device: torch.device) -> None:
    if lists.device != device:
        raise ValueError(f"[SA-211] block_mask must be on q's device {device}, got {lists.device}")
    batch, heads, q_length, kv_length = target
    blocks, entries = blocks_of(q_length), 1 + blocks_of(kv_length)
    if lists.shape[0] not in (1, batch) or lists.shape[1] not in (1, heads) or lists.shape[2:] != (blocks, entries):
        raise ValueError(
            f"[SA-211] block_mask must be of shape (1 or {batch}, 1 or {heads}, {blocks}, {entries}) for {q_length} "
            f"queries and {kv_length} keys in blocks of {BLOCK_TOKENS}, got {tuple(lists.shape)}; "
            "BlockMask.from_blocks takes masks of other blocks"
        )
