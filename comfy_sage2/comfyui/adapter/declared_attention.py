"""The attention that a model's file, or a LoRA, asks for in its layers.

In ComfyUI from 0.37 on an attention module has a child, `comfy_attention`, which reads the tensor
"<module>.comfy_attention.config" of a file: JSON with the name of an attention and its parameters, or a list of such in
order of preference. The module passes its child to ComfyUI's attention function as `preferred_attention`. That function
asks an override first and keeps `preferred_attention` from it, so that what an override leaves would get ComfyUI's
attention and not what the file asks for. Here it is read from the function that asks, which is the override's caller.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from ...text import one_line
from .attention_call import INSIDE, OVERRIDE, comfyui_attention

CHILD = "comfy_attention"
_ARGUMENT = "preferred_attention"
_LONGEST = 60  # characters of a method's name and parameters, which come from a file
_DEEPEST = 64  # frames between an override and ComfyUI's function: those of other packs' overrides


@dataclass(frozen=True)
class DeclaredAttention:
    """The child module into which ComfyUI has read what an attention module's file asks for, and that in words."""

    module: Any
    label: str

    def run(self, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Call ComfyUI's attention function of this name without an override, so that it does what the file asks."""
        options = {name: value for name, value in (kwargs.get("transformer_options") or {}).items() if name != OVERRIDE}
        keywords = {name: value for name, value in kwargs.items() if name != INSIDE}
        return comfyui_attention(function)(
            *args, **{**keywords, "transformer_options": options, _ARGUMENT: self.module}
        )


def declared(module: Any) -> DeclaredAttention | None:
    """What `module`, a child `comfy_attention` or None, asks for; None if this device has no such attention."""
    label = _label(getattr(module, "config", None))
    return DeclaredAttention(module, label) if label and getattr(module, "function", None) is not None else None


def of_caller() -> DeclaredAttention | None:
    """What the file asks for in the attention call whose override is running in this thread."""
    asks = _asking_function()
    frame = None if asks is None else sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        if frame.f_code is asks:
            return declared(frame.f_locals.get(_ARGUMENT))
        frame = frame.f_back
    return None


def _asking_function() -> CodeType | None:
    """The code of ComfyUI's function that asks overrides; None in versions where files declare no attention."""
    from comfy.ldm.modules import attention

    decorator = getattr(getattr(attention, "wrap_attn", None), "__code__", None)
    inner = (value for value in getattr(decorator, "co_consts", ()) if isinstance(value, CodeType))
    return next((code for code in inner if _ARGUMENT in code.co_varnames), None)


@dataclass(frozen=True)
class DeclaredLayers:
    """By label, how many modules ask for an attention: `served` here, or `missing` on this device."""

    served: Mapping[str, int]
    missing: Mapping[str, int]

    @property
    def label(self) -> str:
        return ", ".join(self.served)


NONE_DECLARED = DeclaredLayers({}, {})


def declared_layers(model: Any, patches: Mapping[str, Any] | None = None) -> DeclaredLayers:
    """What attention modules of ComfyUI's `model` ask for; patches: its object patches, perhaps not yet applied."""
    diffusion_model = getattr(model, "diffusion_model", None)
    if not isinstance(diffusion_model, torch.nn.Module):
        return NONE_DECLARED
    return declared_by(_children(diffusion_model, patches or {}))


def declared_by(children: Iterable[Any]) -> DeclaredLayers:
    """What these modules ask for, into which ComfyUI has read it."""
    served: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for child in children:
        label = _label(getattr(child, "config", None))
        if label:
            (missing if getattr(child, "function", None) is None else served)[label] += 1
    return DeclaredLayers(served, missing)


def _children(model: torch.nn.Module, patches: Mapping[str, Any]) -> Iterator[Any]:
    patched = {name.partition(".")[2]: patch for name, patch in patches.items() if name.endswith(f".{CHILD}")}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == CHILD and name not in patched:
            yield module
    yield from patched.values()


def _label(config: object) -> str:
    """A configuration in words, or "" where it names no attention."""
    words = []
    for entry in config if isinstance(config, (list, tuple)) else [config]:
        if isinstance(entry, Mapping) and entry.get("attention"):
            options = ", ".join(f"{name} {value}" for name, value in entry.items() if name != "attention")
            words.append(one_line(f"{entry['attention']}{f' ({options})' if options else ''}"[:_LONGEST]))
    return ", else ".join(words)
