"""Keys that a mask hides from every query: they enter no mean and no scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .scores import LOG2_E, LOWEST_MASK_TERM


def hidden_keys(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which keys a padding mask hides: bool (B | 1, Nkv); None if `attn_mask` has a row for each query or head.

    False, minus infinity and the lowest number of the mask's type hide a key. If a mask hides all keys of a batch
    entry, none counts as hidden: a row of only the lowest number is a uniform row.
    """
    if attn_mask is None or not all(attn_mask.shape[axis] == 1 or attn_mask.stride(axis) == 0 for axis in (1, 2)):
        return None
    if attn_mask.shape[3] == 1:
        return None
    hidden = ~shows(attn_mask[:, 0, 0])
    return hidden & ~hidden.all(dim=1, keepdim=True)


def has_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a 4-D mask of this form has a row for each query or head, with a number for each key."""
    return shape[3] > 1 and any(shape[axis] > 1 and stride[axis] != 0 for axis in (1, 2))


def keys_hidden_from_all_rows(attn_mask: torch.Tensor, q_length: int, *, is_causal: bool) -> torch.Tensor:
    """Which keys a mask that `has_rows` hides from all queries of a head: bool (B | 1, Hq | 1, Nkv).

    A row without a number above the lowest of its type attends to all keys with finite numbers: in a head with such a
    row, only minus infinity hides. If a mask hides all keys of a head, none counts as hidden.
    """
    sizes = (1 if attn_mask.stride(axis) == 0 else attn_mask.shape[axis] for axis in (0, 1, 2))
    mask = attn_mask[tuple(slice(size) for size in sizes)]
    if is_causal:
        seen = torch.ones(q_length, mask.shape[3], dtype=torch.bool, device=mask.device).tril_()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    if mask.dtype == torch.bool:
        hidden = ~mask.any(dim=2)
    else:
        largest_of_rows, largest = mask.amax(dim=3), mask.amax(dim=2)
        is_uniform = ~shows(largest_of_rows) & (largest_of_rows > -torch.inf)
        hidden = (largest == -torch.inf) | (~shows(largest) & ~is_uniform.any(dim=2, keepdim=True))
    return hidden & ~hidden.all(dim=2, keepdim=True)


def shows(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask shows keys: bool of its shape."""
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype == torch.float16:
        return ~(mask <= torch.finfo(torch.float16).min)
    return ~(mask.float() <= LOWEST_MASK_TERM / LOG2_E)
