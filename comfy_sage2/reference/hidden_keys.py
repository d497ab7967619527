"""Keys that a mask hides from every query and head of a batch entry: they enter no mean and no scale."""

from __future__ import annotations

import torch

from .scores import LOG2_E, LOWEST_MASK_TERM


def hidden_keys(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which keys a padding mask hides: bool (B | 1, Nkv), or None where `attn_mask` has a row a query or head.

    A key is hidden by False, by minus infinity and by the lowest number of the mask's type. Where a mask hides all keys
    of a batch entry, none counts as hidden: a row of the lowest number alone is a uniform row. So a mask with one
    number for all keys hides none.

    Args:
        attn_mask: None or 4-D, as for `reference_attention`.
    """
    if attn_mask is None or not all(attn_mask.shape[axis] == 1 or attn_mask.stride(axis) == 0 for axis in (1, 2)):
        return None
    if attn_mask.shape[3] == 1:
        return None
    row = attn_mask[:, 0, 0]
    if row.dtype == torch.bool:
        hidden = ~row
    elif row.dtype == torch.float16:
        hidden = row <= torch.finfo(torch.float16).min
    else:
        hidden = row.float() <= LOWEST_MASK_TERM / LOG2_E
    return hidden & ~hidden.all(dim=1, keepdim=True)
