"""Which layer of the model a call is of: the block that ComfyUI names, and whether it is self-attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ...text import one_line
from .attention_call import AttentionCall

_LONGEST_KIND = 20  # characters of a block's kind, which any pack may set
_FUNCTIONS = {"optimized_attention", "optimized_attention_masked", "attention"}  # by which ComfyUI's models attend


def block_of(options: Mapping[str, Any]) -> str | None:
    """The block that `transformer_options` name during a call, in words, or None.

    A UNet sets its part and a number as "block", and within it the transformer's "block_index"; other models set
    "block_index", and most of them "block_type": "single" for blocks that come after "double" ones and count anew.
    """
    part, index, kind = options.get("block"), options.get("block_index"), options.get("block_type", "double")
    try:
        return _block_in_words(tuple(part[:2]) if isinstance(part, list) else part, index, kind)
    except TypeError:  # a value that no cache can hold
        return _block_in_words.__wrapped__(part, index, kind)


@lru_cache(maxsize=4096, typed=True)
def _block_in_words(part: Any, index: Any, kind: Any) -> str | None:
    words = [] if not isinstance(part, (tuple, list)) else [_plain(entry) for entry in part[:2]]
    if isinstance(index, int):
        if not words and kind != "double":
            words.append(_plain(kind))
        words.append(f"block {index}")
    return " ".join(words) or None


def attention_layers(model: torch.nn.Module) -> int:
    """How many modules of a model of ComfyUI's attend, by the code of their classes; a pass may skip some."""
    names = []
    for name, module in model.named_modules():
        code = getattr(type(module).forward, "__code__", None)
        if code is not None and not _FUNCTIONS.isdisjoint((*code.co_names, *code.co_freevars)):
            names.append(name)
    return sum(not any(inner.startswith(f"{name}.") for inner in names) for name in names)


def is_self_attention(call: AttentionCall, options: Mapping[str, Any], cross_attends: bool = True) -> bool:
    """Whether q and k come from the same tokens; joint attention of text and video counts as that.

    k may have more tokens than q: of a part of the tokens only q is taken (LTX's guides, HiDream-O1, Wan Animate 2), or
    those of earlier frames or passes are kept (Wan's autoregressive sampling, HiDream-O1).

    options: ComfyUI's `transformer_options`. cross_attends: whether the model has cross-attention at all.
    """
    q_length, kv_length = call.form.lengths
    if q_length >= kv_length:
        return q_length == kv_length
    if not cross_attends or _is_kept(call.k, options):
        return True
    # How many tokens the tensor has of which q is a view: by its strides, and of a batch of one, which may have lost
    # its stride, by its memory if that is all it holds.
    q = call.q
    per_token = max(q.stride(2 if call.skip_reshape else 1), call.heads * call.head_dim, 1)
    if q_length < q.stride(0) // per_token <= kv_length:
        return True
    in_memory = q.untyped_storage().nbytes() // (q.element_size() * per_token)
    return q.shape[0] == 1 and q_length < in_memory <= kv_length


def _is_kept(k: torch.Tensor, options: Mapping[str, Any]) -> bool:
    """Whether k is a view of one of the tensors in which autoregressive sampling keeps the keys of earlier frames."""
    state = options.get("ar_state")
    caches = state.get("kv_caches", ()) if isinstance(state, dict) else ()
    kept = (cache.get("k") for cache in caches if isinstance(cache, dict))
    storage = k.untyped_storage().data_ptr()
    return any(isinstance(cache, torch.Tensor) and cache.untyped_storage().data_ptr() == storage for cache in kept)


def _plain(value: object) -> str:
    return one_line(str(value)[:_LONGEST_KIND])
