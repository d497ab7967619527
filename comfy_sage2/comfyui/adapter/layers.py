"""Which layer of the model makes a call: the block that ComfyUI names, and whether the call is self-attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ...text import one_line
from .attention_call import AttentionCall

_MAX_KIND = 20  # characters of a block's kind, which any pack may set
_FUNCTIONS = {"optimized_attention", "optimized_attention_masked", "attention"}  # that ComfyUI's models call


def block_of(options: Mapping[str, Any]) -> str | None:
    """The block that `transformer_options` name during a call, in words, or None.

    A UNet sets "block" to its part and a number, and "block_index" to the transformer's index in it. Other models set
    "block_index", and most set "block_type": "single" blocks come after "double" ones, and their index restarts at 0.
    """
    part, index, kind = options.get("block"), options.get("block_index"), options.get("block_type", "double")
    try:
        return _block_in_words(tuple(part[:2]) if isinstance(part, list) else part, index, kind)
    except TypeError:  # an unhashable value
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
    """How many modules of a ComfyUI model call attention, by the code of their classes; a pass may skip some."""
    names = []
    for name, module in model.named_modules():
        code = getattr(getattr(type(module), "forward", None), "__code__", None)  # a TorchScript class has none
        if code is not None and not _FUNCTIONS.isdisjoint((*code.co_names, *code.co_freevars)):
            names.append(name)
    return sum(not any(inner.startswith(f"{name}.") for inner in names) for name in names)


def is_self_attention(call: AttentionCall, options: Mapping[str, Any], cross_attends: bool = True) -> bool:
    """Whether q and k come from the same tokens; joint attention of text and video counts as that.

    k may have more tokens than q: for some of the tokens the model computes only k and v (LTX's guides, HiDream-O1,
    Wan Animate 2), or it keeps k of earlier frames or passes (Wan's autoregressive sampling, HiDream-O1).

    options: ComfyUI's `transformer_options`. cross_attends: whether the model has cross-attention at all.
    """
    q_length, kv_length = call.form.lengths
    if q_length >= kv_length:
        return q_length == kv_length
    if not cross_attends:
        return True
    try:
        return _is_cached(call.k, options) or _is_view_of_longer(call)
    except NotImplementedError:  # functorch's tensors have no storage
        return False


def _is_view_of_longer(call: AttentionCall) -> bool:
    """Whether q is a view of a tensor of more tokens, at most as many as k has.

    The batch stride of q tells how many tokens that tensor has. A batch of one may have lost that stride; then the size
    of q's storage tells it, if the storage holds nothing else.
    """
    q, (q_length, kv_length) = call.q, call.form.lengths
    per_token = max(q.stride(2 if call.skip_reshape else 1), call.heads * call.head_dim, 1)
    if q_length < q.stride(0) // per_token <= kv_length:
        return True
    if q.shape[0] != 1:
        return False
    tokens_in_storage = q.untyped_storage().nbytes() // (q.element_size() * per_token)
    return q_length < tokens_in_storage <= kv_length


def _is_cached(k: torch.Tensor, options: Mapping[str, Any]) -> bool:
    """Whether k is a view of a cache in which autoregressive sampling keeps the keys of earlier frames."""
    state = options.get("ar_state")
    if not isinstance(state, dict):
        return False
    caches = state.get("kv_caches", ())
    cached_keys = (cache.get("k") for cache in caches if isinstance(cache, dict))
    storage = k.untyped_storage().data_ptr()
    return any(isinstance(keys, torch.Tensor) and keys.untyped_storage().data_ptr() == storage for keys in cached_keys)


def _plain(value: object) -> str:
    return one_line(str(value)[:_MAX_KIND])
