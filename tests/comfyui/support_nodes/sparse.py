"""A sparse attention like ComfyUI 0.36's *Model Sparse Attention*, which needs a GPU and a newer ComfyUI.

Like that node's, its override passes calls outside its range of steps, cross-attention and calls with a mask to the
previous override, and it installs itself on top again before each pass.
"""

from __future__ import annotations

from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP

from .registered import node

OVERRIDE = "optimized_attention_override"


@node(
    "TestSparseAttention", "MODEL", model=("MODEL",), start_percent=("FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0})
)
def sparse_attention(model: Any, start_percent: float) -> Any:
    """From `start_percent` on, compute self-attention over every second key."""
    patched = model.clone()
    start = patched.get_model_object("model_sampling").percent_to_sigma(start_percent)
    installed: list[Any] = []

    def install(options: dict[str, Any]) -> None:
        current = options.get(OVERRIDE)
        if current not in installed:
            installed.append(sparse_override(current, start))
            options[OVERRIDE] = installed[-1]

    install(patched.model_options.setdefault("transformer_options", {}))
    patched.add_callback_with_key(
        CallbacksMP.ON_PREPARE_STATE, "testing", lambda _, __, options: install(options["transformer_options"])
    )
    return patched


def sparse_override(previous: Any, start: float) -> Any:
    """An override that is sparse at noise levels of `start` and below."""

    def override(func: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **kwargs: Any) -> Any:
        sigma = float(kwargs["transformer_options"]["sigmas"][0])
        if sigma > start or q.shape != k.shape or kwargs.get("mask") is not None:
            if previous is None:
                return func(q, k, v, heads, **kwargs)
            return previous(func, q, k, v, heads, **kwargs)
        tokens = 2 if kwargs.get("skip_reshape") else 1
        half = torch.arange(0, k.shape[tokens], 2)
        return func(q, k.index_select(tokens, half), v.index_select(tokens, half), heads, **kwargs)

    return override
