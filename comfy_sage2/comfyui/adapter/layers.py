"""What a model says of an attention call: the block that makes it, and whether it attends to its own tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ...sparsity.mask_cache import ModelChanges
from ...text import one_line
from .attention_call import AttentionCall

_LONGEST_KIND = 20  # characters of a block's kind, which any pack may set
# Parts of the names that ComfyUI's models give to the modules of their cross-attentions.
_CROSS = ("cross", "attn2")


def block_of(options: Mapping[str, Any]) -> str | None:
    """The block that ComfyUI's `transformer_options` name during a call, in words; None where they name none.

    A UNet sets its part and a number as "block", and within it the transformer's "block_index"; other models set
    "block_index", and most of them "block_type": "single" for blocks that come after "double" ones and count anew.
    """
    part, index, kind = options.get("block"), options.get("block_index"), options.get("block_type", "double")
    words = [] if not isinstance(part, (tuple, list)) else [_plain(entry) for entry in part[:2]]
    if isinstance(index, int):
        if not words and kind != "double":
            words.append(_plain(kind))
        words.append(f"block {index}")
    return " ".join(words) or None


_SAID_BY_PROMPTS = ("uuids", "context_window")


def prompts_of(options: Mapping[str, Any]) -> frozenset[str]:
    """What a pass is made for: its prompts, by ComfyUI's numbers for them, each with the context window it is in.

    Empty where a pack's sampler does not tell.
    """
    window = getattr(options.get("context_window"), "index_list", None)
    uuids = options.get("uuids")
    if not isinstance(uuids, (list, tuple)):
        uuids = [] if window is None else [None]
    return frozenset(f"{uuid} {window}" for uuid in uuids)


def changes_of(model: object, options: Mapping[str, Any], inputs: Mapping[str, object]) -> ModelChanges:
    """What makes `model` (ComfyUI's BaseModel) another one for the pass that begins, and its strength in this step.

    A prompt's own LoRA is a hook: ComfyUI changes the model's weights between passes, and by keyframes between steps.
    Guidance nodes make further passes of a prompt with other options, or without some of the model's inputs.

    options: ComfyUI's `transformer_options`. Of switches, texts and sets the values matter; of others, which may count
    the steps, only that they are there. inputs: the model's, by name.
    """
    applied = getattr(getattr(model, "current_patcher", None), "current_hooks", None)
    hooks = {(hook.hook_ref, float(hook.strength)) for hook in ([] if applied is None else applied.hooks)}
    others: set[Hashable] = {("input", name) for name, value in inputs.items() if value is not None}
    for name, value in options.items():
        if name in _SAID_BY_PROMPTS:
            continue
        if isinstance(value, set):
            value = frozenset(value)
        others.add((name, value if isinstance(value, (bool, str, frozenset)) else None))
    patches = options.get("patches_replace")
    if isinstance(patches, Mapping):
        others |= {("patches_replace", part, block) for part, blocks in patches.items() for block in blocks}
    return frozenset(hooks | {(other, 1.0) for other in others})


def replaces_blocks(options: Mapping[str, Any]) -> bool:
    """Whether a patch of this pass takes the place of blocks, which may then make no attention calls."""
    patches = options.get("patches_replace")
    return isinstance(patches, Mapping) and any(patches.values())


def _plain(value: object) -> str:
    return one_line(str(value)[:_LONGEST_KIND])


def has_cross_attention(model: torch.nn.Module) -> bool:
    """Whether one of the modules of `model` is a cross-attention, by its name or its class."""
    names = (f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())
    return any(part in name for name in names for part in _CROSS)


def is_self_attention(call: AttentionCall, options: Mapping[str, Any], cross_attends: bool = True) -> bool:
    """Whether q and k come from the same tokens; joint attention of text and video counts as that.

    options: ComfyUI's `transformer_options`. cross_attends: whether the model has cross-attention at all.
    k may have more tokens than q: of a part of the tokens only q is taken (LTX's guides, HiDream-O1, Wan Animate 2), or
    those of earlier frames or passes are kept (Wan's autoregressive sampling, HiDream-O1).
    """
    q_length, kv_length = call.lengths
    if q_length >= kv_length:
        return q_length == kv_length
    if not cross_attends or _is_kept(call.k, options):
        return True
    return any(q_length < behind <= kv_length for behind in _tokens_behind(call))


def _tokens_behind(call: AttentionCall) -> tuple[int, ...]:
    """How many tokens the tensor has of which q is a view: by its strides, and by its memory if that is all it holds.

    A batch of one may have lost its stride.
    """
    q = call.q
    per_token = max(q.stride(2 if call.skip_reshape else 1), call.heads * call.head_dim, 1)
    by_stride = q.stride(0) // per_token
    if q.shape[0] > 1:
        return (by_stride,)
    return by_stride, q.untyped_storage().nbytes() // (q.element_size() * per_token)


def _is_kept(k: torch.Tensor, options: Mapping[str, Any]) -> bool:
    """Whether k is a view of one of the tensors in which autoregressive sampling keeps the keys of earlier frames."""
    state = options.get("ar_state")
    caches = state.get("kv_caches", ()) if isinstance(state, dict) else ()
    kept = (cache.get("k") for cache in caches if isinstance(cache, dict))
    storage = k.untyped_storage().data_ptr()
    return any(isinstance(cache, torch.Tensor) and cache.untyped_storage().data_ptr() == storage for cache in kept)
