"""The list of backends, and the choice of one for a call before the call is made."""

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
    """A backend was asked for by name and cannot run this call; the message carries its reason."""


def backends(mode: str | None = None) -> tuple[Backend, ...]:
    """All backends, or those for calls in `mode`, the preferred one first."""
    return BACKENDS if mode is None else tuple(backend for backend in BACKENDS if backend.is_for(mode))


def candidates(signature: CallSignature) -> tuple[Backend, ...]:
    """The backends for calls in the signature's mode in order of preference: exact attentions by their times."""
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
    """The backend called `name`, another package's too; ValueError if there is none, TypeError for no name."""
    if not isinstance(name, str):
        raise TypeError(f"[SA-208] backend must be the name of one or None, got {type(name).__name__}")
    for backend in (*BACKENDS, *PEERS):
        if backend.name == name:
            return backend
    raise ValueError(
        f"[SA-208] backend must be one of {', '.join(repr(b.name) for b in BACKENDS)} or None, got {name!r}"
    )


def explain(signature: CallSignature) -> dict[str, str | None]:
    """Backend -> None or why it cannot run `signature`, in order of preference; only those that handle its mode."""
    return {backend.name: backend.reason_against(signature) for backend in candidates(signature)}
