"""The functions of `sageattention` 1.x and 2.x, with the parameters that packs pass.

Tensors are (B, H, N, D) with tensor_layout "HND", (B, N, H, D) with "NHD"; the output has q's shape, layout and dtype,
and the LSE is (B, H, N) float32. K is always smoothed, which changes no exact result: `smooth_k` is accepted and has no
effect. An argument that would change the result and is not supported is a TypeError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ..options import AttentionOptions, check_choice
from ..text import quoted
from .serving import Result, attend

_LAYOUTS = {"HND": "BHND", "NHD": "BNHD"}
# Their accumulators of P V -> ours. Where V is not quantized ours are FP32, which is closer than FP16.
_ACCUMULATORS = {"fp32": "fp32", "fp32+fp32": "fp32", "fp32+fp16": "auto", "fp16": "fp32", "fp16+fp32": "fp32"}
# Other names of two parameters: those of FlashAttention, which yunchang passes, and those of torch.
_ALIASES = {"softmax_scale": "sm_scale", "scale": "sm_scale", "causal": "is_causal"}
# Arguments without a counterpart here -> the values at which they change nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "smooth_k": (True, False),
    "qk_quant_gran": ("per_thread", "per_warp", "per_block"),
    "quantization_backend": ("triton", "cuda"),
    "enable_gqa": (True, False),  # the numbers of heads say it
    "dropout_p": (0.0,),
    "window_size": ((-1, -1), [-1, -1]),
    "softcap": (0.0, None),
    "alibi_slopes": (None,),
    "return_softmax": (False,),
    "return_attn_probs": (False,),
    "deterministic": (False,),
}


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **others: Any,
) -> Result:
    """Mode "8b" in the form of a new *SageAttention2* node: INT8 Q and K, rotated, V in FP8."""
    return _call(
        "8b",
        q,
        k,
        v,
        others,
        tensor_layout=tensor_layout,
        is_causal=is_causal,
        sm_scale=sm_scale,
        return_lse=return_lse,
        attn_mask=attn_mask,
    )


def sageattn_qk_int8_pv_fp8_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **others: Any,
) -> Result:
    """As `sageattn`; "fp32+fp16" takes the accumulators that suit the card."""
    return _call(
        "8b",
        q,
        k,
        v,
        others,
        tensor_layout=tensor_layout,
        is_causal=is_causal,
        sm_scale=sm_scale,
        return_lse=return_lse,
        attn_mask=attn_mask,
        pv_accum_dtype=pv_accum_dtype,
        qk_quant_gran=qk_quant_gran,
        smooth_k=smooth_k,
        smooth_v=smooth_v,
    )


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **others: Any,
) -> Result:
    """As `sageattn`, on every GPU that has kernels."""
    return _call(
        "8b",
        q,
        k,
        v,
        others,
        tensor_layout=tensor_layout,
        is_causal=is_causal,
        sm_scale=sm_scale,
        return_lse=return_lse,
        attn_mask=attn_mask,
        pv_accum_dtype=pv_accum_dtype,
        qk_quant_gran=qk_quant_gran,
        smooth_k=smooth_k,
    )


def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **others: Any,
) -> Result:
    """Mode "precise": INT8 Q and K, V in 16 bits."""
    return _call(
        "precise",
        q,
        k,
        v,
        others,
        tensor_layout=tensor_layout,
        is_causal=is_causal,
        sm_scale=sm_scale,
        return_lse=return_lse,
        attn_mask=attn_mask,
        pv_accum_dtype=pv_accum_dtype,
        qk_quant_gran=qk_quant_gran,
        smooth_k=smooth_k,
        smooth_v=smooth_v,
    )


def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    **others: Any,
) -> Result:
    """Mode "precise": INT8 Q and K, V in 16 bits. Nothing here needs Triton."""
    return _call(
        "precise",
        q,
        k,
        v,
        others,
        tensor_layout=tensor_layout,
        is_causal=is_causal,
        sm_scale=sm_scale,
        return_lse=return_lse,
        attn_mask=attn_mask,
        quantization_backend=quantization_backend,
        smooth_k=smooth_k,
    )


def sageattn_varlen(*args: object, **kwargs: object) -> NoReturn:
    """Refused: sequences of different lengths packed into one tensor have no kernel here."""
    raise NotImplementedError(
        "[SA-603] sageattn_varlen (sequences of different lengths packed into one tensor) has no kernel in this pack: "
        "choose another attention for this model"
    )


def _call(
    mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Mapping[str, Any], **arguments: Any
) -> Result:
    """One call. arguments: a function's own, by name; others: what it was given beyond them."""
    _add(arguments, others)
    for name in [name for name in arguments if name in _WITHOUT_EFFECT]:
        _require_no_effect(name, arguments.pop(name))
    layout = arguments.pop("tensor_layout")
    check_choice("tensor_layout", layout, _LAYOUTS)
    accumulator = arguments.pop("pv_accum_dtype", "fp32+fp16")
    check_choice("pv_accum_dtype", accumulator, _ACCUMULATORS)
    mask = arguments.pop("attn_mask")
    options = AttentionOptions(
        mode=mode,
        smooth_v=bool(arguments.pop("smooth_v", False)) and mode != "precise",
        is_causal=bool(arguments.pop("is_causal")),
        scale=arguments.pop("sm_scale"),
        layout=_LAYOUTS[layout],
        return_lse=bool(arguments.pop("return_lse")),
        pv_accumulator="fp32" if mode == "precise" else _ACCUMULATORS[accumulator],
        rotate=True,
    )
    if arguments:
        raise TypeError(f"[SA-602] this pack's sageattention does not know the arguments {', '.join(arguments)}")
    return attend(q, k, v, mask, options)


def _add(arguments: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Put `others` into `arguments`, by the names that they have here."""
    for name, value in others.items():
        known = _ALIASES.get(name, name)
        if known == name:
            arguments[name] = value
        elif value is not None:  # None leaves it open, as it is without it
            if arguments[known] not in (None, False, value):
                raise TypeError(f"[SA-602] {name} and {known} say different things: {value!r}, {arguments[known]!r}")
            arguments[known] = value


def _require_no_effect(name: str, value: object) -> None:
    """Raise TypeError where the argument would change the result."""
    if not any(value is allowed or value == allowed for allowed in _WITHOUT_EFFECT[name]):
        allowed = " or ".join(map(repr, _WITHOUT_EFFECT[name]))
        raise TypeError(f"[SA-602] this pack's sageattention takes {name} = {allowed} only, got {quoted(value)}")
