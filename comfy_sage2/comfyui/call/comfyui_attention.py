"""ComfyUI's own attention functions, for the places where ComfyUI does not hand one over."""

from __future__ import annotations

from collections.abc import Callable

import torch


def host_attention(name: str = "optimized_attention") -> Callable[..., torch.Tensor]:
    """The attention function `name` of ComfyUI, or the one it chose at start when it has none of that name.

    Called with `_inside_attn_wrapper` it does not look for an override again.
    """
    from comfy.ldm.modules import attention

    return getattr(attention, name, attention.optimized_attention)
