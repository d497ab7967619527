"""The list of backends, and which of them are candidates for a call."""

from __future__ import annotations

from ..autotune.store import choices_of
from ..autotune.timings import Work
from ..backends.base import Backend
from ..backends.exact import EXACT_ATTENTIONS
from ..backends.kernels import KERNELS
from ..backends.peers import PEERS
from ..backends.reference import ReferenceBackend
from ..call.signature import CallSignature
from ..options import EXACT, MODES

# In order of preference.
BACKENDS: tuple[Backend, ...] = (*KERNELS, *EXACT_ATTENTIONS, ReferenceBackend())


class UnsupportedError(ValueError):
    """The requested backend, or every candidate, cannot run this call; the message says why."""


def backends(mode: str | None = None) -> tuple[Backend, ...]:
    """All backends, or those for calls in `mode`, the preferred one first."""
    return BACKENDS if mode is None else tuple(backend for backend in BACKENDS if backend.is_for(mode))


def candidates(signature: CallSignature) -> tuple[Backend, ...]:
    """The backends for the signature's mode, in order of preference; exact attentions are in order of their times."""
    for_mode = backends(signature.options.mode)
    work = Work.of(signature)
    if signature.options.mode != EXACT or work is None:
        return for_mode
    names = [backend.name for backend in for_mode if backend.accelerated]
    names = choices_of(signature.device).fastest_first(names, work)
    return (*map(get, names), *(backend for backend in for_mode if not backend.accelerated))


def kernels() -> tuple[Backend, ...]:
    return tuple(backend for backend in BACKENDS if backend.accelerated and any(map(backend.is_for, MODES)))


def get(name: str) -> Backend:
    """The backend or peer called `name`; ValueError if there is none, TypeError if `name` is not a str."""
    if not isinstance(name, str):
        raise TypeError(f"[SA-208] backend must be the name of one or None, got {type(name).__name__}")
    for backend in (*BACKENDS, *PEERS):
        if backend.name == name:
            return backend
    raise ValueError(
        f"[SA-208] backend must be one of {', '.join(repr(b.name) for b in BACKENDS)} or None, got {name!r}"
    )


def explain(signature: CallSignature) -> dict[str, str | None]:
    """Backend -> None or why it cannot run `signature`, for the backends of its mode in order of preference."""
    return {backend.name: backend.reason_against(signature) for backend in candidates(signature)}
