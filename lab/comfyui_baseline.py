"""A baseline of the paper in the place of a model's attention: for comparison, slower than plain attention."""

from __future__ import annotations

from typing import Any

import torch

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE, AttentionCall, Override
from comfy_sage2.options import check_choice

from .baselines import BASELINES


def baseline_model(model: Any, name: str) -> Any:
    """A clone of `model` (ComfyUI's ModelPatcher) whose attention is the baseline `name`, one of `BASELINES`."""
    check_choice("method", name, tuple(BASELINES))
    patched = model.clone()
    patched.model_options.setdefault("transformer_options", {})[OVERRIDE] = baseline_override(name)
    return patched


def baseline_override(name: str) -> Override:
    """The function that ComfyUI calls in place of its attention.

    It raises ValueError for a call with arguments that it does not know: leaving them out could change the result.
    """
    function = BASELINES[name]

    def override(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = AttentionCall.of(args, kwargs)
        if call.unknown:
            raise ValueError(f"{name} does not know what the model passes: {', '.join(call.unknown)}")
        q, k, v = call.tensors("BHND")
        out, _ = function(q, k, v, scale=call.scale, attn_mask=call.mask_4d())
        out = out.to(q.dtype)
        return call.output(out.transpose(1, 2) if call.layout == "BNHD" else out)

    return override
