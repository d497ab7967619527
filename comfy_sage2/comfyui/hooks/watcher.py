"""Observes the calls that another pack's attention takes: behind this node, or instead of it for some steps.

ComfyUI gives q, k and v in containers to an override that has a `container_function`, so that they can be freed before
the output is made. *Model Sparse Attention* has none, and what it leaves to this node would come as plain tensors that
its own frames hold. Here the containers are kept: it is asked with the tensors, a call that it leaves comes back at
once, and the node gets the containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..adapter.attention_call import OVERRIDE, AttentionCall, Override, comfyui_attention
from ..adapter.packs import held_by, is_sparse_attention, owner_of
from ..session import model_passes
from ..session.session import Session
from .override import HandedBack


@contextmanager
def watching(session: Session, options: dict[str, Any]) -> Iterator[None]:
    """Within the block `session` learns of each call that the override in `options` takes, unless it is this pack's."""
    installed = options.get(OVERRIDE)
    if installed is None or hasattr(installed, "session"):
        yield
        return
    options[OVERRIDE] = session.watcher(installed, lambda: _watcher(session, installed))
    try:
        yield
    finally:
        options[OVERRIDE] = installed


def _watcher(session: Session, taken_by: Override) -> Override:
    """An override that does what `taken_by` does, and tells `session` of the calls that do not come back to it."""
    owner = owner_of(getattr(taken_by, "watched", taken_by))

    def observed(run: Callable[[], torch.Tensor], call: AttentionCall | None, kwargs: dict[str, Any]) -> torch.Tensor:
        running = model_passes.current(session.slot)
        if running is None or call is None:
            return run()
        return session.watch(call, running, run, owner, kwargs.get("transformer_options"))

    def override(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return taken_by(func, *args, **kwargs)
        return observed(lambda: taken_by(func, *args, **kwargs), _call(args, kwargs), kwargs)

    def container_function(*args: Any, **kwargs: Any) -> torch.Tensor:
        # The call alone refers to the tensors, and the session releases it before `run`.
        call = _call((*(container.peek() for container in args[:3]), *args[3:]), kwargs)
        return observed(lambda: taken_by.container_function(*args, **kwargs), call, kwargs)  # type: ignore[attr-defined]

    ours = _node_behind(session, taken_by)

    def bring_containers(*args: Any, **kwargs: Any) -> torch.Tensor:
        containers, rest = args[:3], args[3:]
        running = model_passes.current(session.slot)
        if torch.compiler.is_compiling() or running is None:
            return taken_by(comfyui_attention(), *(container.take() for container in containers), *rest, **kwargs)

        def run() -> torch.Tensor:
            running.raises_handed_back = True
            try:
                out = taken_by(comfyui_attention(), *(container.peek() for container in containers), *rest, **kwargs)
            except HandedBack:
                out = None  # its traceback holds the tensors until this clause ends
            finally:
                running.raises_handed_back = False
            if out is None:
                served: torch.Tensor = ours.container_function(*args, **kwargs)
                return served
            for container in containers:
                container.tensor = None
            return out

        return observed(run, _call((*(container.peek() for container in containers), *rest), kwargs), kwargs)

    if hasattr(taken_by, "container_function"):
        override.container_function = container_function  # type: ignore[attr-defined]
    elif ours is not None:
        override.container_function = bring_containers  # type: ignore[attr-defined]
    override.watched = getattr(taken_by, "watched", taken_by)  # type: ignore[attr-defined]
    return override


def _node_behind(session: Session, taken_by: Override) -> Any:
    """The override of this node to which `taken_by` leaves calls as they are; None where others may stand between."""
    asked = getattr(taken_by, "watched", taken_by)
    if not is_sparse_attention(asked):
        return None
    return next((held for held in held_by(asked) if getattr(held, "session", None) is session), None)


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """The call, or None where only the other pack understands it."""
    try:
        return AttentionCall.of(args, kwargs)
    except TypeError:
        return None
