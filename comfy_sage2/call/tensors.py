"""The tensors of an attention call beside q, k and v."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..block_mask import BlockMask

NO_VALUES = (
    "[SA-204] attn_mask must be a plain bool or float tensor, got a {}, which may hold no values: convert it, or use "
    "is_causal"
)


def overrides_torch(tensor: torch.Tensor) -> bool:
    """Whether the class of `tensor` overrides torch's functions, like CausalBias, whose memory holds no values."""
    if type(tensor) is torch.Tensor:
        return False
    own: Any = type(tensor).__torch_function__
    inherited: Any = torch.Tensor.__torch_function__
    if own is torch._C._disabled_torch_function_impl:
        return False
    return getattr(own, "__func__", None) is not inherited.__func__


def require_mask(attn_mask: object) -> None:
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"[SA-204] attn_mask must be a torch.Tensor or None, got {type(attn_mask).__name__}")


class OptionalTensors(NamedTuple):
    """The optional tensors of a call, as for `attention`; None where the call has none.

    block_mask: the lists of a `BlockMask`, with any values: calls leave out invalid entries, and never read out of
        bounds. invalid_blocks: its `invalid`.
    """

    attn_mask: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    nonfinite: torch.Tensor | None = None
    invalid_blocks: torch.Tensor | None = None
    rotated_heads: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        attn_mask: torch.Tensor | None,
        block_mask: BlockMask | None,
        nonfinite: torch.Tensor | None,
        rotated_heads: torch.Tensor | None,
    ) -> OptionalTensors:
        """Make them from the arguments of `attention`; TypeError names an argument that is not a tensor."""
        if attn_mask is None and block_mask is None and nonfinite is None and rotated_heads is None:
            return NO_TENSORS
        require_mask(attn_mask)
        if attn_mask is not None and overrides_torch(attn_mask):
            raise TypeError(NO_VALUES.format(type(attn_mask).__name__))
        if block_mask is not None and not isinstance(block_mask, BlockMask):
            raise TypeError(
                f"[SA-211] block_mask must be a comfy_sage2.BlockMask or None, got {type(block_mask).__name__}; make "
                "one with BlockMask(tensor) or BlockMask.from_dense(block_mask)"
            )
        invalid = None if block_mask is None else block_mask.invalid
        flags = (("nonfinite", nonfinite), ("block_mask.invalid", invalid), ("rotated_heads", rotated_heads))
        for name, flag in flags:
            if flag is not None and not isinstance(flag, torch.Tensor):
                raise TypeError(f"[SA-209] {name} must be an int32 tensor, got {type(flag).__name__}")
        lists = None if block_mask is None else block_mask.lists
        return cls(attn_mask, lists, nonfinite, invalid, rotated_heads)


FLAGS = ("nonfinite", "invalid_blocks")
WRITTEN = (*FLAGS, "rotated_heads")  # what a call that chooses rotated heads may write to
NO_TENSORS = OptionalTensors()


def mask_4d(mask: torch.Tensor | None) -> torch.Tensor | None:
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


def with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy if its last dimension is strided: a copy costs less than the fallback attention."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
