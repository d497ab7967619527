"""The functions of `sageattention` 1.x and 2.x, with the parameters that packs pass.

Tensors are (B, H, N, D) with tensor_layout "HND", (B, N, H, D) with "NHD"; the output has q's shape, layout and dtype,
and the LSE is (B, H, N) float32. K is always smoothed, which changes no exact result: `smooth_k` is accepted and has no
effect. An unsupported argument that would change the result raises a TypeError that names it.

Packs assign `sageattn` to torch.nn.functional.scaled_dot_product_attention, so it takes whatever torch's function
takes: its order and names of arguments, tensors of other dimensions, dropout. Torch computes what no kernel can serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

import torch

from ...options import AttentionOptions, check_choice, is_valid_scale
from ...text import quoted
from ..torch_attention import CallTensors
from .serving import Result, attend
from .varlen import attend_segments

__all__ = [
    "sageattn",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_varlen",
]

_LAYOUTS = {"HND": "BHND", "NHD": "BNHD"}
# sageattention's accumulators of P V -> ours. If V is not quantized, ours are FP32, which is more exact than FP16.
_ACCUMULATORS = {"fp32": "fp32", "fp32+fp32": "fp32", "fp32+fp16": "auto", "fp16": "fp32", "fp16+fp32": "fp32"}
# Other names of two parameters: those of FlashAttention, which yunchang passes, and those of torch.
_ALIASES: Mapping[str, str] = {"softmax_scale": "sm_scale", "scale": "sm_scale", "causal": "is_causal"}
# Arguments without a counterpart here -> the values at which they change nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "smooth_k": (True, False),
    "qk_quant_gran": ("per_thread", "per_warp", "per_block"),
    "quantization_backend": ("triton", "cuda"),
    "enable_gqa": (True, False),  # the numbers of heads tell it
    "window_size": ((-1, -1), [-1, -1]),
    "softcap": (0.0, None),
    "alibi_slopes": (None,),
    "return_softmax": (False,),
    "return_attn_probs": (False,),
    "deterministic": (False,),
}

_TENSORS = ("q", "k", "v")
# The parameters of torch's function in its order, by our names.
_TORCHS_ORDER = (*_TENSORS, "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_TORCHS_NAMES = {"query": "q", "key": "k", "value": "v"}


def _function(name: str, mode: str, doc: str, **defaults: Any) -> Callable[..., Result]:
    """A function in `mode`. defaults: its parameters after q, k and v, in the order in which packs pass them."""
    order, names = (*_TENSORS, *defaults), {*defaults, "attn_mask"}

    def function(*args: Any, **kwargs: Any) -> Result:
        arguments = _by_name(name, order, args, kwargs)
        tensors = arguments.pop("q"), arguments.pop("k"), arguments.pop("v")
        own: dict[str, Any] = {**defaults}
        further: dict[str, Any] = {}
        for key, value in arguments.items():
            (own if key in names else further)[key] = value
        if further:
            own.update(_renamed(own, further))
        inputs = CallTensors(*tensors, own.pop("attn_mask", None))
        layout, return_lse = own.pop("tensor_layout"), own.pop("return_lse")
        options, scale, dropout_p = _options(mode, layout, own, return_lse=return_lse)
        return attend(inputs, options, scale, dropout_p)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    # ComfyUI looks for attn_mask in the signature.
    parameters = [Parameter(tensor, Parameter.POSITIONAL_OR_KEYWORD) for tensor in _TENSORS]
    parameters += [Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=value) for key, value in defaults.items()]
    if "attn_mask" not in defaults:
        parameters.append(Parameter("attn_mask", Parameter.KEYWORD_ONLY, default=None))
    parameters.append(Parameter("further", Parameter.VAR_KEYWORD))
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return function


def _by_name(name: str, order: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `name` by our names. If the fourth is a mask or None, they are in torch's order."""
    if len(args) > len(_TENSORS) and (args[3] is None or isinstance(args[3], torch.Tensor)):
        order = _TORCHS_ORDER
    if len(args) > len(order):
        raise TypeError(f"[SA-602] {name} takes at most {len(order)} arguments by position, got {len(args)}")
    # `zip` without its argument `strict`, which the compiler of torch 2.7 to 2.9 cannot trace.
    arguments = dict(zip(order, args))  # noqa: B905
    if "query" in kwargs or "key" in kwargs or "value" in kwargs:
        kwargs = {_TORCHS_NAMES.get(key, key): value for key, value in kwargs.items()}
    arguments.update(kwargs)
    if len(arguments) < len(args) + len(kwargs):
        raise TypeError(f"[SA-602] {name} got an argument both by position and by name")
    if not ("q" in arguments and "k" in arguments and "v" in arguments):
        raise TypeError(f"[SA-602] {name} needs q, k and v, got {', '.join(arguments) or 'no argument'}")
    return arguments


sageattn = _function(
    "sageattn",
    "8b",
    """Mode "8b": INT8 Q and K, rotated in the heads that gain by it, V in FP8.""",
    tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False,
)  # fmt: skip
sageattn_qk_int8_pv_fp8_cuda = _function(
    "sageattn_qk_int8_pv_fp8_cuda",
    "8b",
    """As `sageattn`; "fp32+fp16" takes the accumulators that suit the GPU.""",
    tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread", sm_scale=None, pv_accum_dtype="fp32+fp16",
    smooth_k=True, smooth_v=False, return_lse=False,
)  # fmt: skip
sageattn_qk_int8_pv_fp8_cuda_sm90 = _function(
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "8b",
    """As `sageattn`, on every GPU that has kernels.""",
    tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread", sm_scale=None, pv_accum_dtype="fp32+fp32",
    smooth_k=True, return_lse=False,
)  # fmt: skip
sageattn_qk_int8_pv_fp16_cuda = _function(
    "sageattn_qk_int8_pv_fp16_cuda",
    "precise",
    """Mode "precise": INT8 Q and K, V in 16 bits.""",
    tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread", sm_scale=None, pv_accum_dtype="fp32",
    smooth_k=True, smooth_v=False, return_lse=False,
)  # fmt: skip
sageattn_qk_int8_pv_fp16_triton = _function(
    "sageattn_qk_int8_pv_fp16_triton",
    "precise",
    """Mode "precise": INT8 Q and K, V in 16 bits. Nothing here needs Triton.""",
    tensor_layout="HND", quantization_backend="triton", is_causal=False, attn_mask=None, sm_scale=None, smooth_k=True,
    return_lse=False,
)  # fmt: skip


def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **further: Any,
) -> torch.Tensor:
    """Attention within each of several sequences that are packed into one tensor, in mode "precise".

    Args:
        q, k, v: (tokens, H, D), (tokens, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) integers: where each sequence begins, and where the last one ends.
        max_seqlen_q, max_seqlen_k: not needed here.
        is_causal: query i of a sequence attends to its keys 0..i.

    Returns (tokens, H, D); zeros for tokens outside of all sequences, and for sequences without keys.

    Raises TypeError for an argument that is not supported, and TypeError or ValueError for cu_seqlens_q and
    cu_seqlens_k that are no tensors or do not fit.
    """
    own = {"is_causal": is_causal, "sm_scale": sm_scale, "smooth_k": smooth_k}
    options, scale, dropout_p = _options("precise", "NHD", {**own, **_renamed(own, further)}, return_lse=False)
    return attend_segments(q, k, v, cu_seqlens_q, cu_seqlens_k, options, scale, dropout_p)


def _options(
    mode: str, tensor_layout: str, arguments: dict[str, Any], *, return_lse: bool
) -> tuple[AttentionOptions, float | None, float]:
    """Options, scale and dropout. The options have the scale too, if it is valid for them; torch takes any."""
    for name in [name for name in arguments if name in _WITHOUT_EFFECT]:
        value, allowed = arguments.pop(name), _WITHOUT_EFFECT[name]
        if not any(value is permitted or value == permitted for permitted in allowed):
            words = " or ".join(map(repr, allowed))
            raise TypeError(f"[SA-602] this pack's sageattention takes {name} = {words} only, got {quoted(value)}")
    check_choice("tensor_layout", tensor_layout, _LAYOUTS)
    accumulator = arguments.pop("pv_accum_dtype", "fp32+fp16")
    check_choice("pv_accum_dtype", accumulator, _ACCUMULATORS)
    scale, dropout_p = arguments.pop("sm_scale"), arguments.pop("dropout_p", 0.0)
    if not isinstance(scale, (float, type(None))):
        try:
            scale = float(scale)  # an integer, a NumPy number, or a tensor of one element
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise TypeError(f"[SA-205] sm_scale must be a number or None, got {quoted(scale)}") from error
    options = AttentionOptions(
        mode=mode,
        smooth_v=bool(arguments.pop("smooth_v", False)) and mode != "precise",
        is_causal=bool(arguments.pop("is_causal")),
        scale=scale if is_valid_scale(scale) else None,
        layout=_LAYOUTS[tensor_layout],
        return_lse=bool(return_lse),
        pv_accumulator="fp32" if mode == "precise" else _ACCUMULATORS[accumulator],
    )
    if arguments:
        raise TypeError(f"[SA-602] this pack's sageattention does not know the arguments {', '.join(arguments)}")
    return options, scale, dropout_p


def _renamed(own: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """`further` by our names; TypeError if one contradicts an argument of `own`."""
    renamed: dict[str, Any] = {}
    for alias, value in further.items():
        name = _ALIASES.get(alias, alias)
        if name == alias:
            renamed[name] = value
        elif value is not None:  # None is the same as no argument
            earlier = renamed.get(name, own[name])
            if earlier not in (None, False, value):
                raise TypeError(f"[SA-602] {alias} and {name} say different things: {quoted(value)}, {quoted(earlier)}")
            renamed[name] = value
    return renamed
