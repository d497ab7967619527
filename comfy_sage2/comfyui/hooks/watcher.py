"""Observes the calls that another pack's attention takes: one after this node, or one in its place for some steps.

ComfyUI passes q, k and v in containers to an override that has a `container_function`, so that it can free them before
it makes the output. *Model Sparse Attention* has none: a call that it leaves to this node would come as plain tensors,
which its own frames keep alive. So the watcher keeps the containers and calls that override with the tensors. If the
call comes to this node, it raises HandedBack at once, and the watcher calls the node again with the containers.
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
    """Within the block, `session` sees each call that the override in `options` takes, unless that is this pack's."""
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
    """An override that calls `taken_by`, and reports to `session` the calls that do not come back to its node."""
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
        # Besides the containers only `call` refers to the tensors, and the session releases it before `run`.
        call = _call((*(container.peek() for container in args[:3]), *args[3:]), kwargs)
        return observed(lambda: taken_by.container_function(*args, **kwargs), call, kwargs)  # type: ignore[attr-defined]

    own_override = _own_override(session, taken_by)

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
                out = None  # the traceback holds the tensors until this clause ends
            finally:
                running.raises_handed_back = False
            if out is None:
                served: torch.Tensor = own_override.container_function(*args, **kwargs)
                return served
            for container in containers:
                container.tensor = None
            return out

        return observed(run, _call((*(container.peek() for container in containers), *rest), kwargs), kwargs)

    if hasattr(taken_by, "container_function"):
        override.container_function = container_function  # type: ignore[attr-defined]
    elif own_override is not None:
        override.container_function = bring_containers  # type: ignore[attr-defined]
    override.watched = getattr(taken_by, "watched", taken_by)  # type: ignore[attr-defined]
    return override


def _own_override(session: Session, taken_by: Override) -> Any:
    """This node's override, if `taken_by` passes calls to it unchanged; None if others may stand between them."""
    watched = getattr(taken_by, "watched", taken_by)
    if not is_sparse_attention(watched):
        return None
    return next((held for held in held_by(watched) if getattr(held, "session", None) is session), None)


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """The call, or None if only the other pack understands its arguments."""
    try:
        return AttentionCall.of(args, kwargs)
    except TypeError:
        return None
