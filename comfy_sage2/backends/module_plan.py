"""The fields of a call that a kernel module needs for a plan: those of csrc/attention_call.h."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import torch

from ..block_mask import blocks_of
from ..call.signature import CallSignature
from ..options import AUTO, GIVEN, AttentionOptions
from .readable import padded_channels

# As in csrc/attention_call.h.
ELEMENT_CODES = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
WHOLE_CALL, PREQUANTIZATION, ATTENTION = 0, 1, 2  # phases

Strides = tuple[int, int, int]  # of batch, head and token, in elements
Fields = dict[str, int | float]

_AXES = ("batch", "head", "token")
_MASK_AXES = ("batch", "head", "query", "key")
# (option, its field there, the numbers of its values or ()), for the options that the kernels take.
_OPTIONS = tuple(
    (option.name, option.metadata["argument"], option.metadata["choices"])
    for option in fields(AttentionOptions)
    if option.metadata["argument"] is not None and option.name != "scale"
)


class Views(NamedTuple):
    """The strides of the tensors as BHND, 0 where a mask or a block mask (batch, head) broadcasts."""

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    mask: tuple[int, int, int, int] | None = None
    block_mask: tuple[int, int] | None = None


def option_fields(options: AttentionOptions) -> dict[str, int]:
    """The options without the scale, as the kernels' fields."""
    values = ((argument, choices, getattr(options, name)) for name, argument, choices in _OPTIONS)
    return {argument: choices[value] if choices else value for argument, choices, value in values}


def plan_fields(signature: CallSignature, views: Views, batch: int, kv_heads: int) -> Fields:
    """The keywords of the module's `plan`, for a part of a call with `batch` entries and `kv_heads` k and v heads."""
    keywords: Fields = {
        "batch": batch,
        "q_heads": kv_heads * (signature.q_heads // signature.kv_heads),
        "kv_heads": kv_heads,
        "q_length": signature.q_length,
        "kv_length": signature.kv_length,
        "head_dim": padded_channels(signature.head_dim),
        "element": ELEMENT_CODES[signature.dtype],
        "device": -1 if signature.device.index is None else signature.device.index,
        "scale": signature.scale,
        **option_fields(signature.options),
        "has_lse": signature.options.return_lse,
    }
    if signature.options.rotate == AUTO:
        keywords["rotate_by_head"] = True
    elif signature.options.rotate == GIVEN:
        keywords["rotate_as_given"] = True
    if views.block_mask is not None:
        keywords["block_mask_key_blocks"] = blocks_of(signature.kv_length)
        keywords["block_mask_batch_stride"], keywords["block_mask_head_stride"] = views.block_mask
    for name in ("q", "k", "v", "out"):
        for axis, stride in zip(_AXES, getattr(views, name), strict=True):
            keywords[f"{name}_{axis}_stride"] = stride
    if views.mask is not None and signature.mask_dtype is not None:
        keywords["mask_element"] = ELEMENT_CODES[signature.mask_dtype]
        for axis, stride in zip(_MASK_AXES, views.mask, strict=True):
            keywords[f"mask_{axis}_stride"] = stride
    return keywords
