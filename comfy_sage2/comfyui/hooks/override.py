"""The function that ComfyUI calls in place of its own attention."""

from __future__ import annotations

from typing import Any

import torch

from ..adapter import declared_attention
from ..adapter.attention_call import AttentionCall, Override, comfyui_attention
from ..session import model_passes
from ..session.session import Session
from . import compiled


class HandedBack(Exception):
    """The call reached the node with plain tensors; the watcher catches this and brings their containers."""


def make_override(session: Session) -> Override:
    """A closure: older versions of ComfyUI deep-copy model options, and a copied object would lose its record."""
    slot, previous = session.slot, session.previous

    def override(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled.attend(slot, func, previous, args, kwargs)
        return attend(func, args, kwargs)

    def container_function(*args: Any, **kwargs: Any) -> torch.Tensor:
        """ComfyUI 0.31 and later call this with q, k and v in containers, each of which gives its tensor away once."""
        if torch.compiler.is_compiling() or model_passes.current(slot) is None:
            return override(comfyui_attention(), *(container.take() for container in args[:3]), *args[3:], **kwargs)
        return attend(None, args, kwargs)

    def attend(func: Override | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """func: None if q, k and v come in containers; the attention that ComfyUI chose takes its place."""
        running = model_passes.current(slot)
        if running is not None and running.raises_handed_back:
            raise HandedBack
        declared = declared_attention.of_caller() if session.leaves_to_declared else None

        def fallback() -> torch.Tensor:
            plain = comfyui_attention() if func is None else func
            if declared is not None:
                return declared.run(plain.__name__, args, kwargs)
            if previous is None:
                return plain(*args, **kwargs)  # ComfyUI takes the containers and frees them one by one
            if func is not None:
                return previous(func, *args, **kwargs)
            if hasattr(previous, "container_function"):
                served: torch.Tensor = previous.container_function(*args, **kwargs)
                return served
            return previous(plain, *(container.take() for container in args[:3]), *args[3:], **kwargs)

        # A call outside of the sampler's forward passes has no step and no layer, so the node leaves it.
        if running is None:
            return fallback()
        # Besides the containers only `call` refers to the tensors, and the session releases it before `fallback`.
        call = AttentionCall.of_containers(args, kwargs) if func is None else AttentionCall.of(args, kwargs)
        call.declared = None if declared is None else declared.label
        out = session.attend(call, running, fallback, kwargs.get("transformer_options"))
        if func is None:
            call.empty_containers()  # no matter who served the call
        return out

    override.container_function = container_function  # type: ignore[attr-defined]
    override.session = session  # type: ignore[attr-defined]  # nodes in a row recognize each other by it
    return override
