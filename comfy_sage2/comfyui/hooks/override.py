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
    """The call has come to the node, as plain tensors: who holds their containers is to bring these."""


def make_override(session: Session) -> Override:
    """A closure: older versions of ComfyUI deep-copy model options, and a copied object would lose its record."""
    slot, previous = session.slot, session.previous

    def override(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled.attend(slot, func, previous, args, kwargs)
        return attend(func, args, kwargs)

    def container_function(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Called by ComfyUI 0.31 and later when q, k and v come in containers that give their tensor away once."""
        if torch.compiler.is_compiling() or model_passes.current(slot) is None:
            return override(comfyui_attention(), *(container.take() for container in args[:3]), *args[3:], **kwargs)
        return attend(None, args, kwargs)

    def attend(func: Override | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """func: None where q, k and v come in containers; then it is the attention that ComfyUI chose."""
        running = model_passes.current(slot)
        if running is not None and running.raises_handed_back:
            raise HandedBack
        declared = declared_attention.of_caller() if session.leaves_to_declared else None

        def fallback() -> torch.Tensor:
            asked = comfyui_attention() if func is None else func
            if declared is not None:
                return declared.run(asked.__name__, args, kwargs)
            if previous is None:
                return asked(*args, **kwargs)  # containers as they are: ComfyUI frees them one by one
            if func is not None:
                return previous(func, *args, **kwargs)
            if hasattr(previous, "container_function"):
                served: torch.Tensor = previous.container_function(*args, **kwargs)
                return served
            return previous(asked, *(container.take() for container in args[:3]), *args[3:], **kwargs)

        # Outside of a forward pass of the sampler there is no step and no layer: the call is not this node's.
        if running is None:
            return fallback()
        # In containers the call alone refers to the tensors, and the session releases it before `fallback`.
        call = AttentionCall.of_containers(args, kwargs) if func is None else AttentionCall.of(args, kwargs)
        call.declared = None if declared is None else declared.label
        out = session.attend(call, running, fallback, kwargs.get("transformer_options"))
        if func is None:
            call.empty_containers()  # whoever served it
        return out

    override.container_function = container_function  # type: ignore[attr-defined]
    override.session = session  # type: ignore[attr-defined]  # by which nodes in a row know each other
    return override
