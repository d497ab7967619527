"""Find which pack provides an attention function."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from ...text import one_line
from .attention_call import comfyui_attention

_MAX_NAME = 60  # characters of a pack's name
_NODE_FILES = "comfy_extras"
_CORE = ("comfy", _NODE_FILES, "nodes")
_NODES = {"nodes_sparse_attention": "Model Sparse Attention"}  # file name in ComfyUI -> its node


def owner_of(function: object) -> str:
    """The provider of the attention `function`, in words: the folder of a pack in custom_nodes, or ComfyUI's node."""
    function = getattr(function, "func", function)  # the function of a functools.partial
    parts = _parts(function)
    if "custom_nodes" in parts[:-1]:
        return one_line(parts[parts.index("custom_nodes") + 1][:_MAX_NAME])
    if not _is_core(parts):
        return one_line(parts[0][:_MAX_NAME])
    if parts[-1] in _NODES:
        return f"ComfyUI's {_NODES[parts[-1]]}"
    # *Model Attention Backend* holds the attention function that it installs in a closure.
    names = (str(getattr(entry, "__name__", "")) for entry in held_by(function))
    chosen = next((name for name in names if name.startswith("attention")), None)
    return "ComfyUI's attention node" + ("" if chosen is None else f" ({one_line(chosen[:_MAX_NAME])})")


def replaced_methods(modules: Iterable[torch.nn.Module]) -> list[object]:
    """The functions that replace a method of the class, such as forward, on single modules.

    When ComfyUI removes an object patch, it sets the class's own method on the module; such a method does not count.
    """
    functions: list[object] = []
    for module in modules:
        module_class: Any = type(module)
        own, methods = vars(module), _methods(module_class)
        if not methods.isdisjoint(own):  # rarely true, and a model has thousands of modules
            functions += [
                value
                for name, value in own.items()
                if name in methods and callable(value) and not _is_own_method(module, name, value)
            ]
    return functions


def _is_own_method(module: torch.nn.Module, name: str, function: object) -> bool:
    return getattr(function, "__self__", None) is module and (
        getattr(function, "__func__", None) is getattr(type(module), name, None)
    )


@lru_cache(maxsize=1024)
def _methods(module_class: type) -> frozenset[str]:
    return frozenset(name for name in dir(module_class) if callable(getattr(module_class, name, None)))


def pack_of(function: object) -> str | None:
    """The folder of the pack in custom_nodes that defines `function`, or None."""
    return owner_of(function) if "custom_nodes" in _parts(getattr(function, "func", function))[:-1] else None


def _parts(function: object) -> list[str]:
    """The parts of the module name of `function`; ComfyUI names the modules of nodes by their file paths."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return [part for part in re.split(r"[./\\]", str(module)) if part] or [""]


def _is_core(parts: list[str]) -> bool:
    return parts[0] in _CORE or _NODE_FILES in parts[:-1]


def is_sparse_attention(function: object) -> bool:
    """Whether `function` is the override of ComfyUI's *Model Sparse Attention*; it passes dense calls on unchanged."""
    return _parts(function)[-1] in _NODES


def has_foreign_override(override: object) -> bool:
    """Whether another pack's attention is among the overrides that `override` begins; it may keep state between calls.

    ComfyUI's own overrides keep none that matters.
    """
    while override is not None:
        session = getattr(override, "session", None)
        if session is not None:
            override = session.previous
        elif _is_core(_parts(override)):
            override = next((entry for entry in held_by(override) if hasattr(entry, "session")), None)
        else:
            return True
    return False


def block_owner(options: Mapping[str, Any]) -> str | None:
    """Who replaces transformer blocks in a pass, in words, or None; it may compute their attention or skip it."""
    replaced = options.get("patches_replace")
    blocks = replaced.get("dit") if isinstance(replaced, Mapping) else None
    patch = next(iter(blocks.values()), None) if isinstance(blocks, Mapping) else None
    if patch is None:
        return None
    parts = _parts(patch)
    if "custom_nodes" in parts or not _is_core(parts):
        return owner_of(patch)
    return f"ComfyUI's {_NODES.get(parts[-1], one_line(parts[-1][:_MAX_NAME]))}"


def own_is_torchs() -> bool:
    """Whether the attention that ComfyUI chose at startup is torch's; False without ComfyUI."""
    try:
        return getattr(comfyui_attention(), "__name__", "") == "attention_pytorch"
    except ImportError:
        return False


def held_by(function: object) -> Iterator[object]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
