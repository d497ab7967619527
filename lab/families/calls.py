"""Counts every attention call of a model, whether the node's hook sees it or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE

_NAMES = ("optimized_attention", "optimized_attention_masked")


@dataclass
class Calls:
    """Attention calls of a sampling.

    Attributes:
        made: all of them.
        unasked: those for which ComfyUI calls no hook.
        masked: those with a mask.
        contained: those with their tensors in containers, which a kernel may release.
        longest: tokens of the longest one.
    """

    made: int = 0
    unasked: int = 0
    masked: int = 0
    contained: int = 0
    longest: int = 0

    def add(self, q: Any, mask: Any, transformer_options: Any) -> None:
        """Count a call by its arguments; `q` may be in a container."""
        self.made += 1
        self.unasked += OVERRIDE not in (transformer_options or {})
        self.masked += mask is not None
        contained = hasattr(q, "peek")
        self.contained += contained
        self.longest = max(self.longest, (q.peek() if contained else q).shape[-2])


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls of ComfyUI's attention functions, whichever of them its model files have imported."""
    calls = Calls()
    replaced: list[tuple[Any, str, Any]] = []

    def counting(func: Any) -> Any:
        def attention(*args: Any, **kwargs: Any) -> Any:
            mask = args[4] if len(args) > 4 else kwargs.get("mask")
            calls.add(args[0], mask, kwargs.get("transformer_options"))
            return func(*args, **kwargs)

        return attention

    for module in [module for name, module in sys.modules.items() if name.startswith("comfy.ldm.")]:
        for name in _NAMES:
            func = module.__dict__.get(name)
            if callable(func):
                replaced.append((module, name, func))
                setattr(module, name, counting(func))
    try:
        yield calls
    finally:
        for module, name, func in replaced:
            setattr(module, name, func)
