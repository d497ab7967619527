"""Other attentions in place of ComfyUI's: overrides of its hook, each if its package can be imported."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE, AttentionCall

from ..bench import peers as bench_peers

# q, k, v (B, H, N, D) and a mask or None -> the output (B, H, N, D).
Plain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Override = Callable[..., torch.Tensor]

KITCHEN = "comfy-kitchen INT8"
ALL_PEERS = ("torch-cudnn", "flash-attention-3", "sageattention", KITCHEN)


def override_of(attend: Plain, *, takes_mask: bool) -> Override:
    """An override that computes every call by `attend`.

    ComfyUI computes calls with a mask that `attend` does not take, or with their own scale.
    """

    def override(
        func: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        *args: Any,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        forms = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        if (mask is not None and not takes_mask) or kwargs.get("scale") is not None:
            out: torch.Tensor = func(q, k, v, heads, mask, *args, **forms, **kwargs)
            return out
        q, k, v = AttentionCall.of((q, k, v, heads), {"skip_reshape": skip_reshape}).tensors("BHND")
        result = attend(q, k, v, mask)
        return result if skip_output_reshape else result.transpose(1, 2).flatten(2)

    return override


def _mean_of_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return v.mean(2, keepdim=True).expand(-1, -1, q.shape[2], -1)


# Gives every query the mean of all values: what is left of a step when attention costs nothing.
attention_for_nothing = override_of(_mean_of_values, takes_mask=True)


def with_override(patcher: Any, override: Override) -> Any:
    """A copy of ComfyUI's ModelPatcher whose attention `override` computes."""
    patched = patcher.clone()
    patched.model_options.setdefault("transformer_options", {})[OVERRIDE] = override
    return patched


def comfy_kitchen(*, takes_containers: bool = False) -> Override | None:
    """ComfyUI's own choice of comfy-kitchen's INT8 attention; None if it is not available."""
    import comfy.ldm.modules.attention as comfyui_attention

    if not getattr(comfyui_attention, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", False):
        return None
    attend = comfyui_attention.attention_comfy_kitchen_int8

    def override(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = attend(*args, **kwargs)
        return out

    if takes_containers:
        override.container_function = attend.container_function  # type: ignore[attr-defined]
    return override


def peers(names: Collection[str] = ALL_PEERS) -> tuple[dict[str, Override], dict[str, str]]:
    """Name -> override for the attentions that are available here; name -> reason for the others."""
    candidates = bench_peers.find([name for name in names if name != KITCHEN])
    overrides = {
        candidate.name: override_of(candidate.attend, takes_mask=candidate.name == "cuDNN")
        for candidate in candidates.able
    }
    missing = dict(candidates.missing)
    kitchen = comfy_kitchen() if KITCHEN in names else None
    if kitchen is not None:
        overrides[KITCHEN] = kitchen
    elif KITCHEN in names:
        missing[KITCHEN] = "this ComfyUI offers no INT8 attention of comfy-kitchen here"
    return overrides, missing
