"""Other attentions in the place of ComfyUI's: overrides of its hook, each where its package can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import comfy_sage2
from comfy_sage2.block_mask import BlockMask, blocks_of
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall

from ..bench.peers import flash_attention_3

# q, k, v (B, H, N, D) and a mask or None -> the output (B, H, N, D).
Plain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Override = Callable[..., torch.Tensor]


def override_of(attend: Plain, *, takes_mask: bool) -> Override:
    """An override that computes every call by `attend`.

    Calls with a mask that it does not take, or with a scale of their own, stay with ComfyUI.
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
        if (mask is not None and not takes_mask) or kwargs.get("scale") is not None:
            out: torch.Tensor = func(
                q,
                k,
                v,
                heads,
                mask,
                *args,
                skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape,
                **kwargs,
            )
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


def share_of_the_blocks(mode: str, share: float) -> Override:
    """Self-attention by our kernels with lists of this share of the key blocks, at random; other calls dense."""
    known: dict[tuple[int, torch.device], BlockMask] = {}

    def lists(length: int, device: torch.device) -> BlockMask:
        blocks = blocks_of(length)
        shuffled = torch.rand(1, 1, blocks, blocks, device=device).argsort(dim=3)
        return BlockMask.from_dense(shuffled < blocks * share)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        of_call = (q.shape[2], q.device)
        if q.shape[2] == k.shape[2] and of_call not in known:
            known[of_call] = lists(*of_call)
        return comfy_sage2.attention(
            q, k, v, block_mask=known[of_call] if q.shape[2] == k.shape[2] else None, mode=mode, rotate="off"
        )

    return override_of(attend, takes_mask=False)


def with_override(patcher: Any, override: Override) -> Any:
    """A copy of ComfyUI's ModelPatcher that asks `override` for its attention."""
    patched = patcher.clone()
    patched.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = override
    return patched


def _cudnn() -> Override:
    if not torch.backends.cudnn.is_available():
        raise ImportError("this torch has no cuDNN")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return override_of(attend, takes_mask=True)


def _comfy_kitchen() -> Override:
    import comfy.ldm.modules.attention as comfyui_attention

    if not getattr(comfyui_attention, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", False):
        raise ImportError("its INT8 attention is not available here")

    def override(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = comfyui_attention.attention_comfy_kitchen_int8(*args, **kwargs)
        return out

    return override


def _flash_attention_3() -> Override:
    flash, _ = flash_attention_3()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        answer = flash.flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)))
        out: torch.Tensor = answer[0] if isinstance(answer, tuple) else answer
        return out.transpose(1, 2)

    return override_of(attend, takes_mask=False)


def _sage_attention() -> Override:
    sage = importlib.import_module("sageattention")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = sage.sageattn(q, k, v, tensor_layout="HND")
        return out

    return override_of(attend, takes_mask=False)


_MAKERS: dict[str, Callable[[], Override]] = {
    "cuDNN": _cudnn,
    "comfy-kitchen INT8": _comfy_kitchen,
    "FlashAttention-3": _flash_attention_3,
    "SageAttention 2": _sage_attention,
}


def peers() -> tuple[dict[str, Override], dict[str, str]]:
    """Name -> override of the attentions that can be had here, and for the others name -> why not."""
    found: dict[str, Override] = {}
    missing: dict[str, str] = {}
    for name, make in _MAKERS.items():
        try:
            found[name] = make()
        except Exception as error:  # whatever a package raises when it is imported
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing
