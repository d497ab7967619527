"""The functions of `sageattention` 1.x and 2.x, with the parameters that packs pass.

Tensors are (B, H, N, D) with tensor_layout "HND", (B, N, H, D) with "NHD"; the output has q's shape, layout and dtype,
and the LSE is (B, H, N) float32. K is always smoothed, which changes no exact result: `smooth_k` is accepted and has no
effect. An argument that would change the result and is not supported is a TypeError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ...options import AttentionOptions, check_choice
from ...text import quoted
from .serving import Result, attend

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
]

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
    return _call("8b", (q, k, v), tensor_layout, is_causal, sm_scale, return_lse, attn_mask, others)


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
    """As `sageattn`; "fp32+fp16" takes the accumulators that suit the GPU."""
    own = {"pv_accum_dtype": pv_accum_dtype, "qk_quant_gran": qk_quant_gran, "smooth_k": smooth_k, "smooth_v": smooth_v}
    return _call("8b", (q, k, v), tensor_layout, is_causal, sm_scale, return_lse, attn_mask, {**own, **others})


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
    own = {"pv_accum_dtype": pv_accum_dtype, "qk_quant_gran": qk_quant_gran, "smooth_k": smooth_k}
    return _call("8b", (q, k, v), tensor_layout, is_causal, sm_scale, return_lse, attn_mask, {**own, **others})


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
    own = {"pv_accum_dtype": pv_accum_dtype, "qk_quant_gran": qk_quant_gran, "smooth_k": smooth_k, "smooth_v": smooth_v}
    return _call("precise", (q, k, v), tensor_layout, is_causal, sm_scale, return_lse, attn_mask, {**own, **others})


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
    own = {"quantization_backend": quantization_backend, "smooth_k": smooth_k}
    return _call("precise", (q, k, v), tensor_layout, is_causal, sm_scale, return_lse, attn_mask, {**own, **others})


def sageattn_varlen(*args: object, **kwargs: object) -> NoReturn:
    """Refused: sequences of different lengths packed into one tensor have no kernel here."""
    raise NotImplementedError(
        "[SA-603] sageattn_varlen (sequences of different lengths packed into one tensor) has no kernel in this pack: "
        "choose another attention for this model"
    )


def _call(
    mode: str,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    attn_mask: torch.Tensor | None,
    others: Mapping[str, Any],
) -> Result:
    """One call. others: by their names the arguments that not all of the functions have."""
    given: dict[str, Any] = {"is_causal": is_causal, "sm_scale": sm_scale}
    _add(given, others)
    for name in [name for name in given if name in _WITHOUT_EFFECT]:
        _require_no_effect(name, given.pop(name))
    check_choice("tensor_layout", tensor_layout, _LAYOUTS)
    accumulator = given.pop("pv_accum_dtype", "fp32+fp16")
    check_choice("pv_accum_dtype", accumulator, _ACCUMULATORS)
    options = AttentionOptions(
        mode=mode,
        smooth_v=bool(given.pop("smooth_v", False)) and mode != "precise",
        is_causal=bool(given.pop("is_causal")),
        scale=given.pop("sm_scale"),
        layout=_LAYOUTS[tensor_layout],
        return_lse=bool(return_lse),
        pv_accumulator="fp32" if mode == "precise" else _ACCUMULATORS[accumulator],
        rotate=True,
    )
    if given:
        raise TypeError(f"[SA-602] this pack's sageattention does not know the arguments {', '.join(given)}")
    return attend(*qkv, attn_mask, options)


def _add(given: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Put `others` into `given`, by the names that they have here."""
    for name, value in others.items():
        known = _ALIASES.get(name, name)
        if known == name:
            given[name] = value
        elif value is not None:  # None leaves it open, as it is without it
            if given[known] not in (None, False, value):
                different = f"{quoted(value)}, {quoted(given[known])}"
                raise TypeError(f"[SA-602] {name} and {known} say different things: {different}")
            given[known] = value


def _require_no_effect(name: str, value: object) -> None:
    """Raise TypeError where the argument would change the result."""
    if not any(value is allowed or value == allowed for allowed in _WITHOUT_EFFECT[name]):
        allowed = " or ".join(map(repr, _WITHOUT_EFFECT[name]))
        raise TypeError(f"[SA-602] this pack's sageattention takes {name} = {allowed} only, got {quoted(value)}")
