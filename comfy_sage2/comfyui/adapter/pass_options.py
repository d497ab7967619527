"""What the options and inputs of a pass tell: its prompts, and what changes the model's computation in it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ...sparsity.choices import ModelChanges

_PROMPT_OPTIONS = ("uuids", "context_window")


def prompts_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of a batch's prompts, each with its context window; empty if ComfyUI passes neither."""
    window = getattr(options.get("context_window"), "index_list", None)
    uuids = options.get("uuids")
    if not isinstance(uuids, (list, tuple)):
        uuids = [] if window is None else [None]
    return tuple(f"{uuid} {window}" for uuid in uuids)


def changes_of(model: object, options: Mapping[str, Any], inputs: Mapping[str, object]) -> ModelChanges:
    """What changes the computation of `model` (ComfyUI's BaseModel) in the pass that begins, with its strength.

    A prompt's own LoRA is a hook: ComfyUI changes the model's weights between passes, and keyframes change its strength
    between steps. Guidance nodes add passes with other `transformer_options`, or without some of the model's inputs.
    The values of bools, strings and sets count; of other options, which may differ in each step, only the presence.
    """
    applied = getattr(getattr(model, "current_patcher", None), "current_hooks", None)
    hooks = {(hook.hook_ref, float(hook.strength)) for hook in ([] if applied is None else applied.hooks)}
    changes: set[Hashable] = {("input", name) for name, value in inputs.items() if value is not None}
    for name, value in options.items():
        if name in _PROMPT_OPTIONS:
            continue
        if isinstance(value, set):
            value = frozenset(value)
        changes.add((name, value if isinstance(value, (bool, str, frozenset)) else None))
    patches = options.get("patches_replace")
    if isinstance(patches, Mapping):
        changes |= {("patches_replace", part, block) for part, blocks in patches.items() for block in blocks}
    return frozenset(hooks | {(change, 1.0) for change in changes})


def replaces_blocks(options: Mapping[str, Any]) -> bool:
    """Whether a patch of this pass replaces blocks; replaced blocks may make no attention calls."""
    patches = options.get("patches_replace")
    return isinstance(patches, Mapping) and any(patches.values())
