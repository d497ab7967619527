"""What the kernels can read in place, and copies of the rest."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch

from ..call.signature import TensorForm

ALIGNMENT = 16  # bytes: the kernels read q, k and v in vectors of this size
CHANNEL_MULTIPLE = 8


@lru_cache(maxsize=1024)
def is_readable(form: TensorForm) -> bool:
    """Whether the kernels can read a tensor of this form in place, if its address is a multiple of ALIGNMENT.

    They can when head_dim is a multiple of 8 and every token starts at a multiple of 16 bytes, as in all real models.
    """
    if form.shape[-1] % CHANNEL_MULTIPLE:
        return False
    # The stride of an axis of one element may be anything.
    steps = [step for step, size in zip(form.stride[:-1], form.shape[:-1], strict=True) if size > 1]
    return gcd(*steps) * form.dtype.itemsize % ALIGNMENT == 0


def padded_channels(head_dim: int) -> int:
    return head_dim + -head_dim % CHANNEL_MULTIPLE


def readable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, padded with channels of zeros to a multiple of CHANNEL_MULTIPLE."""
    *sizes, head_dim = tensor.shape
    copy = tensor.new_empty((*sizes, padded_channels(head_dim)))
    copy[..., :head_dim].copy_(tensor)
    copy[..., head_dim:].zero_()
    return copy


def is_readable_in_place(tensor: torch.Tensor) -> bool:
    is_plain = not tensor.is_neg()  # else its memory holds the negated values
    return is_plain and is_readable(TensorForm.of(tensor)) and tensor.data_ptr() % ALIGNMENT == 0


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the kernels can read it in place, else a copy."""
    return tensor if is_readable_in_place(tensor) else readable_copy(tensor)
