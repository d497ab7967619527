"""Which backend serves a call of the host, decided before the call and remembered for calls of the same form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ... import registry
from ...attention import explain
from ...backends.base import AttentionRequest
from ...options import AttentionOptions
from ..call.attention_call import HostCall


@dataclass(frozen=True)
class Selection:
    """The backend's name, or the reason why there is none."""

    backend: str | None
    reason: str | None


def _joined(reasons: dict[str, str | None]) -> str:
    """The reasons of several backends in one line; a reason that all share stands once."""
    distinct = set(reasons.values())
    if len(distinct) == 1:
        return str(distinct.pop())
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _pick(explained: dict[str, str | None], backend: str) -> Selection:
    """The first candidate of `backend`, the user's choice, that has no reason against it."""
    if backend == "auto":
        candidates = {b.name: explained[b.name] for b in registry.backends() if b.accelerated and b.name in explained}
    else:
        candidates = {backend: explained[backend]}
    for name, reason in candidates.items():
        if reason is None:
            return Selection(name, None)
    return Selection(None, _joined(candidates) if candidates else "this installation has no accelerated backend")


def probe(device: torch.device, backend: str, mode: str) -> Selection:
    """The backend that will serve ordinary calls on `device`, or why none can serve any call there.

    It asks about the form of call that every kernel is made for; where even that has a reason against it, the reason
    is the machine and not the call.
    """
    request = AttentionRequest.ordinary(device, AttentionOptions(mode))
    return _pick(registry.explain(request), backend)


class Selector:
    """Chooses backends for the calls of one node; safe to use from several threads."""

    def __init__(self, backend: str) -> None:
        """`backend`: the user's choice, "auto" or a name."""
        self._backend = backend
        self._known: dict[tuple[object, ...], Selection] = {}

    def select(self, call: HostCall, mode: str, smooth_v: bool) -> Selection:
        """The backend for `call` in `mode`; input that the attention API refuses gives its error as the reason."""
        key = (*call_form(call), mode, smooth_v)
        selection = self._known.get(key)
        if selection is None:
            selection = self._decide(call, mode, smooth_v)
            self._known[key] = selection
        return selection

    def _decide(self, call: HostCall, mode: str, smooth_v: bool) -> Selection:
        try:
            q, k, v = call.tensors()
            explained = explain(
                q,
                k,
                v,
                mode=mode,
                smooth_v=smooth_v,
                scale=call.scale,
                attn_mask=call.mask_4d(),
                layout=call.layout,
            )
        except (TypeError, ValueError) as error:
            return Selection(None, str(error))
        return _pick(explained, self._backend)


def call_form(call: HostCall) -> tuple[object, ...]:
    """All of a call that a decision can depend on, and the time that it takes."""
    described = [(t.shape, t.dtype, t.device, t.stride(-1)) for t in (call.q, call.k, call.v)]
    mask = None if call.mask is None else (call.mask.shape, call.mask.dtype, call.mask.device)
    return (*described, mask, call.heads, call.skip_reshape, call.skip_output_reshape, call.scale)
