"""Weights that ComfyUI copies to the device before a block of the model runs, because they stay in RAM.

Where such a weight has patches (LoRAs), each call of its layer adds them: to a copy if the weight has to be converted
for that, and else to the very weight that the layer's next call gets. ComfyUI calls a layer once in a block and does
not notice. Whoever calls it again gets the patches twice.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # quantized weights are converted
_PATCHES = ("weight_lowvram_function", "bias_lowvram_function")


def may_be_called_again(module: Any, dtype: torch.dtype) -> bool:
    """Whether all layers of a module give the same again in this block. dtype: of the input, in which they compute."""
    return not any(_keeps_patches(layer, dtype) for layer in module.modules())


def _keeps_patches(layer: Any, dtype: torch.dtype) -> bool:
    state = getattr(layer, "_prefetch", None)
    if state is None or all(getattr(layer, name, None) is None for name in _PATCHES):
        return False
    if not isinstance(state, dict):  # of another ComfyUI
        return True
    # A weight with a signature has a place on the device: its first call says that it holds the patches.
    if state.get("resident") or state.get("signature") is not None or state.get("needs_cast"):
        return False
    tensors: list[Any] = [getattr(layer, name, None) for name in ("weight", "bias")]
    return any(type(tensor) in _PLAIN and tensor.dtype == dtype for tensor in tensors)
