"""The attention that a model's file, or a LoRA, asks for in its layers.

In ComfyUI 0.37 and later, an attention module has a child, `comfy_attention`, which reads the tensor
"<module>.comfy_attention.config" of a file: JSON with the name and parameters of an attention, or a list of these in
order of preference. The module passes its child to ComfyUI's attention function as `preferred_attention`. That function
calls an override first and does not pass `preferred_attention` to it, so a call that the override leaves would get
ComfyUI's attention instead of the one that the file asks for. This module therefore reads `preferred_attention` from
the frame of that function, which is the override's caller.
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
_MAX_LABEL = 60  # characters of an attention's name and parameters, which come from a file
_MAX_FRAMES = 64  # frames from this override to ComfyUI's function; other packs' overrides lie between them


@dataclass(frozen=True)
class DeclaredAttention:
    """The `comfy_attention` child of an attention module, and the attention that the file asks for, in words."""

    module: Any
    label: str

    def run(self, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Call ComfyUI's attention function of this name without an override, to compute what the file asks for."""
        options = {name: value for name, value in (kwargs.get("transformer_options") or {}).items() if name != OVERRIDE}
        keywords = {name: value for name, value in kwargs.items() if name != INSIDE}
        return comfyui_attention(function)(
            *args, **{**keywords, "transformer_options": options, _ARGUMENT: self.module}
        )


def declared(module: Any) -> DeclaredAttention | None:
    """What `module`, a `comfy_attention` child or None, asks for; None if this device has no such attention."""
    label = _label(getattr(module, "config", None))
    return DeclaredAttention(module, label) if label and getattr(module, "function", None) is not None else None


def of_caller() -> DeclaredAttention | None:
    """What the file asks for in the attention call whose override is running in this thread."""
    asking_code = _code_that_calls_overrides()
    frame = None if asking_code is None else sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code is asking_code:
            return declared(frame.f_locals.get(_ARGUMENT))
        frame = frame.f_back
    return None


def _code_that_calls_overrides() -> CodeType | None:
    """The code of ComfyUI's function that calls overrides; None in versions where files declare no attention."""
    from comfy.ldm.modules import attention

    decorator = getattr(getattr(attention, "wrap_attn", None), "__code__", None)
    inner = (value for value in getattr(decorator, "co_consts", ()) if isinstance(value, CodeType))
    return next((code for code in inner if _ARGUMENT in code.co_varnames), None)


@dataclass(frozen=True)
class DeclaredLayers:
    """How many modules ask for each attention, by label: those `served` and those `missing` on this device."""

    served: Mapping[str, int]
    missing: Mapping[str, int]

    @property
    def label(self) -> str:
        return ", ".join(self.served)


NONE_DECLARED = DeclaredLayers({}, {})


def declared_layers(model: Any, patches: Mapping[str, Any] | None = None) -> DeclaredLayers:
    """What attention modules of ComfyUI's `model` ask for. patches: its object patches, maybe not applied yet."""
    diffusion_model = getattr(model, "diffusion_model", None)
    if not isinstance(diffusion_model, torch.nn.Module):
        return NONE_DECLARED
    return declared_by(_children(diffusion_model, patches or {}))


def declared_by(children: Iterable[Any]) -> DeclaredLayers:
    """What these `comfy_attention` modules ask for."""
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
    """A configuration in words, or "" if it names no attention."""
    words = []
    for entry in config if isinstance(config, (list, tuple)) else [config]:
        if isinstance(entry, Mapping) and entry.get("attention"):
            options = ", ".join(f"{name} {value}" for name, value in entry.items() if name != "attention")
            words.append(one_line(f"{entry['attention']}{f' ({options})' if options else ''}"[:_MAX_LABEL]))
    return ", else ".join(words)
