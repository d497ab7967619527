"""Weights in RAM that ComfyUI copies to the device before a block of the model runs.

If such a weight has patches (LoRAs), each call of its layer adds them: to a copy if the weight has to be converted for
that, else in place, to the weight that the layer's next call reads. ComfyUI calls a layer once per block, so it does
not notice. A second call in the block would add the patches twice.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # weights of other classes are quantized, so they are converted
_PATCHES = ("weight_lowvram_function", "bias_lowvram_function")


def may_be_called_again(module: Any, dtype: torch.dtype) -> bool:
    """Whether a second call of a module in this block gives the same result. dtype: of the input and computation."""
    return not any(_patches_in_place(layer, dtype) for layer in module.modules())


def _patches_in_place(layer: Any, dtype: torch.dtype) -> bool:
    state = getattr(layer, "_prefetch", None)
    if state is None or all(getattr(layer, name, None) is None for name in _PATCHES):
        return False
    if not isinstance(state, dict):  # of an unknown version of ComfyUI
        return True
    # A weight with a signature has a place on the device: its first call marks it as patched.
    if state.get("resident") or state.get("signature") is not None or state.get("needs_cast"):
        return False
    tensors: list[Any] = [getattr(layer, name, None) for name in ("weight", "bias")]
    return any(type(tensor) in _PLAIN and tensor.dtype == dtype for tensor in tensors)
