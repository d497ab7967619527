"""Checks on the arguments of the attention call: each message names the argument, what is expected and what came."""

from __future__ import annotations

import torch

from .block_mask import BLOCK_TOKENS, BlockMask, blocks_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MASK_DTYPES = (torch.bool, *DTYPES)
MAX_HEAD_DIM = 256


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Check rank, dtype, device, sizes and strides of q, k, v as the caller passed them, in `layout`.

    Raises:
        TypeError: an argument is no tensor, has an unsupported dtype, or the dtypes differ.
        ValueError: rank, device, sizes or strides do not fit together.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_one(name, tensor, layout)
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


def _check_one(name: str, tensor: torch.Tensor, layout: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"[SA-201] {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != 4:
        raise ValueError(
            f"[SA-201] {name} must have 4 dimensions ({layout}), got {tensor.dim()}: shape {tuple(tensor.shape)}"
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(f"[SA-201] {name} must be float16, bfloat16 or float32, got {tensor.dtype}")
    if tensor.numel() == 0:
        raise ValueError(f"[SA-201] {name} must not be empty, got shape {tuple(tensor.shape)} ({layout})")
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        raise ValueError(
            f"[SA-201] {name} must be contiguous in its last dimension (stride 1), got stride {tensor.stride(3)}; "
            f"call {name}.contiguous() first"
        )


def check_nonfinite(flag: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return `flag`, None or one int32 on `device`; TypeError for another dtype, else ValueError."""
    if flag is not None:
        _check_flag("nonfinite", flag, device)
    return flag


def _check_flag(name: str, flag: torch.Tensor, device: torch.device) -> None:
    if not isinstance(flag, torch.Tensor) or flag.dtype != torch.int32:
        found = flag.dtype if isinstance(flag, torch.Tensor) else type(flag).__name__
        raise TypeError(f"[SA-209] {name} must be an int32 tensor, got {found}")
    if flag.numel() != 1 or flag.device != device:
        raise ValueError(
            f"[SA-209] {name} must be one element on q's device {device}, got shape {tuple(flag.shape)} on "
            f"{flag.device}"
        )


def check_block_margins(
    block_margins: torch.Tensor | None, target: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    """Return `block_margins`, None or what fits a call of `target` = (batch, q_heads, q_length, kv_length).

    Raises:
        TypeError: no float32 tensor.
        ValueError: device, sizes or strides do not fit.
    """
    if block_margins is None:
        return None
    if not isinstance(block_margins, torch.Tensor) or block_margins.dtype != torch.float32:
        found = block_margins.dtype if isinstance(block_margins, torch.Tensor) else type(block_margins).__name__
        raise TypeError(f"[SA-213] block_margins must be a float32 tensor or None, got {found}")
    if block_margins.device != device:
        raise ValueError(f"[SA-213] block_margins must be on q's device {device}, got {block_margins.device}")
    batch, heads, q_length, kv_length = target
    wanted = (batch, heads, blocks_of(q_length), blocks_of(kv_length))
    if block_margins.shape != wanted:
        raise ValueError(
            f"[SA-213] block_margins must be of shape {wanted} for {q_length} queries and {kv_length} keys in blocks "
            f"of {BLOCK_TOKENS}, got {tuple(block_margins.shape)}"
        )
    if not block_margins.is_contiguous():
        raise ValueError(f"[SA-213] block_margins must be contiguous, got strides {block_margins.stride()}")
    return block_margins


def check_mask(
    mask: torch.Tensor | None, target: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    """Return `mask` as a 4-D view that broadcasts to `target` = (batch, q_heads, q_length, kv_length).

    Raises:
        TypeError: no tensor, or neither bool nor a supported float dtype.
        ValueError: rank, device or sizes do not fit.
    """
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"[SA-204] attn_mask must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask.dtype not in MASK_DTYPES:
        raise TypeError(
            "[SA-204] attn_mask must be bool (True = attend) or an additive float16, bfloat16 or float32, got "
            f"{mask.dtype}"
        )
    if mask.device != device:
        raise ValueError(f"[SA-204] attn_mask must be on q's device {device}, got {mask.device}")
    if not 2 <= mask.dim() <= 4:
        raise ValueError(f"[SA-204] attn_mask must have 2 to 4 dimensions, got {mask.dim()}: shape {tuple(mask.shape)}")
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if any(size not in (1, wanted) for size, wanted in zip(padded, target, strict=True)):
        raise ValueError(
            f"[SA-204] attn_mask must broadcast to (batch, q_heads, q_length, kv_length) = {tuple(target)}, "
            f"got shape {tuple(mask.shape)}"
        )
    for _ in range(4 - mask.dim()):
        mask = mask.unsqueeze(0)
    return mask


def check_block_mask(
    block_mask: BlockMask | None, target: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    """Return the tensor of `block_mask` for a call of `target` = (batch, q_heads, q_length, kv_length).

    No value of it is read.

    Raises:
        TypeError: no BlockMask, or its flag is no int32 tensor.
        ValueError: device or sizes do not fit.
    """
    if block_mask is None:
        return None
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"[SA-211] block_mask must be a comfy_sage2.BlockMask or None, got {type(block_mask).__name__}; make one "
            "with BlockMask(tensor) or BlockMask.from_dense(mask)"
        )
    lists = block_mask.lists
    if lists.device != device:
        raise ValueError(f"[SA-211] block_mask must be on q's device {device}, got {lists.device}")
    batch, heads, q_length, kv_length = target
    q_blocks, entries = blocks_of(q_length), 1 + blocks_of(kv_length)
    if lists.shape[0] not in (1, batch) or lists.shape[1] not in (1, heads) or lists.shape[2:] != (q_blocks, entries):
        raise ValueError(
            f"[SA-211] block_mask must be of shape (1 or {batch}, 1 or {heads}, {q_blocks}, {entries}) for {q_length} "
            f"queries and {kv_length} keys in blocks of {BLOCK_TOKENS}, got {tuple(lists.shape)}; "
            "BlockMask.from_blocks takes masks of other blocks"
        )
    if block_mask.invalid is not None:
        _check_flag("block_mask.invalid", block_mask.invalid, device)
    return lists
