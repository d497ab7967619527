"""The list of backends, and the choice of one for a call before the call is made."""

from __future__ import annotations

from collections.abc import Mapping

from .autotune.store import choices_of
from .backends.base import AttentionRequest, Backend
from .backends.exact import EXACT_ATTENTIONS
from .backends.kernels import KERNELS
from .backends.reference import ReferenceBackend
from .options import EXACT, MODES

# In order of preference.
_BACKENDS: tuple[Backend, ...] = (*KERNELS, *EXACT_ATTENTIONS, ReferenceBackend())


class UnsupportedError(ValueError):
    """A backend was asked for by name and cannot run this call; the message carries its reason."""


def backends(mode: str | None = None) -> tuple[Backend, ...]:
    """All backends, or those for calls in `mode`, the preferred one first."""
    return _BACKENDS if mode is None else tuple(backend for backend in _BACKENDS if backend.is_for(mode))


def candidates(request: AttentionRequest) -> tuple[Backend, ...]:
    """The backends for calls in the request's mode, the preferred one first: of exact attentions the fastest one."""
    found = backends(request.options.mode)
    choices = choices_of(request.device)
    if request.options.mode != EXACT or choices is None or request.work is None:
        return found
    names = choices.fastest_first([backend.name for backend in found if backend.accelerated], request.work)
    return (*map(get, names), *(backend for backend in found if not backend.accelerated))


def kernels() -> tuple[Backend, ...]:
    """The accelerated backends that quantize."""
    return tuple(backend for backend in _BACKENDS if backend.accelerated and any(map(backend.is_for, MODES)))


def get(name: str) -> Backend:
    """The backend called `name`; ValueError lists the names when there is none."""
    for backend in _BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(
        f"[SA-208] backend must be one of {', '.join(repr(b.name) for b in _BACKENDS)} or None, got {name!r}"
    )


def choose(request: AttentionRequest, *, accelerated_only: bool = False) -> Backend | None:
    """The first accelerated backend that can run `request`.

    When none can: None with `accelerated_only`, else the first unaccelerated one that can (the reference).
    """
    for accelerated in (True,) if accelerated_only else (True, False):
        for backend in candidates(request):
            if backend.accelerated == accelerated and backend.reason_against(request) is None:
                return backend
    return None


def require(name: str | None, request: AttentionRequest) -> Backend:
    """The backend that runs `request`: the named one, or the chosen one when `name` is None.

    Raises:
        UnsupportedError: the named backend, or every backend, cannot run it; the message says why.
    """
    if name is None:
        chosen = choose(request)
        if chosen is None:
            reasons = "; ".join(f"{backend}: {reason}" for backend, reason in explain(request).items())
            raise UnsupportedError(f"[SA-207] no backend can run this call: {reasons}")
        return chosen
    backend = get(name)
    reason = backend.reason_against(request)
    if reason is not None:
        raise UnsupportedError(f"[SA-207] backend {name!r} cannot run this call: {reason}")
    return backend


def explain(request: AttentionRequest) -> dict[str, str | None]:
    """Backend name -> None if it can run `request`, else the reason, in order of preference.

    Kernels are left out of what is said about mode "exact", and exact attentions of what is said about the others.
    """
    return {backend.name: backend.reason_against(request) for backend in candidates(request)}


def first_able(explained: Mapping[str, str | None], wanted: str | None) -> tuple[str | None, dict[str, str]]:
    """Of what `explain` says: the first backend that can run the call, or None, and why others cannot.

    wanted: the only one that counts, by its name; None: the accelerated ones.
    """
    counting = [name for name in explained if (get(name).accelerated if wanted is None else name == wanted)]
    reasons = {name: reason for name in counting if (reason := explained[name]) is not None}
    return next((name for name in counting if name not in reasons), None), reasons
