"""The function that ComfyUI calls in place of its own attention."""

from __future__ import annotations

from typing import Any

import torch

from ..serve.session import Override, Session
from . import compiled, forwards
from .attention_call import HostCall
from .comfyui_attention import host_attention


def make_override(session: Session) -> Override:
    """An override for `session`.

    It is a closure: older hosts deep-copy model options, and a copied object would lose its statistics.
    """
    slot, previous = session.slot, session.previous

    def override(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled.attend(slot, func, previous, args, kwargs)
        return _attend(func, args, kwargs)

    def _attend(func: Override, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        def fallback() -> torch.Tensor:
            return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

        forward = forwards.current(slot)
        # Outside of a forward pass of the sampler nobody is there to own the call.
        return fallback() if forward is None else session.attend(HostCall.of(args, kwargs), forward, fallback)

    def container_function(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Called by ComfyUI 0.31 and later when q, k and v come in containers that give their tensor away once."""
        containers, rest = args[:3], args[3:]

        def fallback() -> torch.Tensor:
            if previous is None:
                return host_attention()(*args, **kwargs)  # still in containers: the host frees them one by one
            if hasattr(previous, "container_function"):
                return previous.container_function(*args, **kwargs)
            return previous(host_attention(), *(container.take() for container in containers), *rest, **kwargs)

        forward = forwards.current(slot)
        if torch.compiler.is_compiling() or forward is None:
            return override(host_attention(), *(container.take() for container in containers), *rest, **kwargs)
        call = HostCall.of((*(container.peek() for container in containers), *rest), kwargs)
        out = session.attend(call, forward, fallback)
        for container in containers:
            container.tensor = None  # consumed, as the caller expects, whoever served the call
        return out

    override.container_function = container_function  # type: ignore[attr-defined]
    override.session = session  # type: ignore[attr-defined]  # by which nodes in a row know each other
    return override
