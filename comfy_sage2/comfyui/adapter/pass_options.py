"""What a model says of a pass: what it is made for, and what makes the model another one in it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ...sparsity.choices import ModelChanges

_SAID_BY_PROMPTS = ("uuids", "context_window")


def prompts_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The prompts of a batch, each with its context window, by ComfyUI's numbers; empty where nobody tells."""
    window = getattr(options.get("context_window"), "index_list", None)
    uuids = options.get("uuids")
    if not isinstance(uuids, (list, tuple)):
        uuids = [] if window is None else [None]
    return tuple(f"{uuid} {window}" for uuid in uuids)


def changes_of(model: object, options: Mapping[str, Any], inputs: Mapping[str, object]) -> ModelChanges:
    """What makes `model` (ComfyUI's BaseModel) another one for the pass that begins, and its strength in this step.

    A prompt's own LoRA is a hook: ComfyUI changes the model's weights between passes, and by keyframes between steps.
    Guidance nodes make further passes with other `transformer_options`, or without some of the model's inputs. Of
    switches, texts and sets the values matter; of others, which may count the steps, only that they are there.
    """
    applied = getattr(getattr(model, "current_patcher", None), "current_hooks", None)
    hooks = {(hook.hook_ref, float(hook.strength)) for hook in ([] if applied is None else applied.hooks)}
    changes: set[Hashable] = {("input", name) for name, value in inputs.items() if value is not None}
    for name, value in options.items():
        if name in _SAID_BY_PROMPTS:
            continue
        if isinstance(value, set):
            value = frozenset(value)
        changes.add((name, value if isinstance(value, (bool, str, frozenset)) else None))
    patches = options.get("patches_replace")
    if isinstance(patches, Mapping):
        changes |= {("patches_replace", part, block) for part, blocks in patches.items() for block in blocks}
    return frozenset(hooks | {(change, 1.0) for change in changes})


def replaces_blocks(options: Mapping[str, Any]) -> bool:
    """Whether a patch of this pass replaces blocks, which may then make no attention calls."""
    patches = options.get("patches_replace")
    return isinstance(patches, Mapping) and any(patches.values())
