"""The decision about an attention call: who computes it, made once for all calls of one signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

import torch

from . import registry
from .autotune import store
from .autotune.cost_model import TunedChoices
from .autotune.store import choices_of
from .autotune.timings import PEER, PLAIN, Candidate
from .backends.base import Backend
from .block_mask import blocks_of
from .options import EXACT, AttentionOptions
from .registry import UnsupportedError
from .request import AttentionRequest
from .signature import ANY, IGNORED, NAMED, CallSignature, TensorForm
from .validation import check_call

EXACT_IS_FASTER = "[SA-314] exact attention was measured to be faster here"
TORCHS_IS_FASTER = "[SA-314] ComfyUI's own attention was measured to be faster here"
OWN_IS_FASTER = "[SA-314] no exact attention was measured to be faster than ComfyUI's own here"
MOST_PLANS = 1024


class CallPlan:
    """How calls of one signature are computed.

    Attributes:
        signature: theirs.
        backend: who computes them.
        request: their description, with options that leave nothing open.
        reason: why another attention takes the place of the mode that was asked for, or which faster one does not.
        run, prequantize: as of `BoundCall`; the tensors are of the signature, in the layout of its options.
    """

    __slots__ = ("backend", "prequantize", "reason", "request", "run", "signature")

    def __init__(
        self, signature: CallSignature, backend: Backend, request: AttentionRequest, reason: str | None = None
    ) -> None:
        """`backend` has no reason against `request`, which describes `signature`."""
        request = backend.settled(request)
        call = backend.bind(signature, request)
        self.signature = signature
        self.backend = backend
        self.request = request
        self.reason = reason
        self.run = call.run
        self.prequantize = call.prequantize

    @property
    def options(self) -> AttentionOptions:
        """Those of the call, with nothing left open."""
        return self.request.options


@dataclass(frozen=True, eq=False)
class Refusal:
    """Why no call of a signature can be computed.

    Attributes:
        error: what `attention` raises, and `text`: with these words.
        reasons: by the names of the backends that were candidates; empty where the call itself is wrong.
    """

    error: type[Exception]
    text: str
    reasons: Mapping[str, str] = field(default_factory=dict)

    def throw(self) -> NoReturn:
        """Raise the error: TypeError or ValueError, of which `UnsupportedError` is one."""
        raise self.error(self.text)

    @property
    def reason(self) -> str:
        """In one line for the user; a reason that all backends share stands once."""
        distinct = list(dict.fromkeys(self.reasons.values()))
        if len(distinct) > 1:
            return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return distinct[0] if distinct else self.text


def plan(signature: CallSignature) -> CallPlan | Refusal:
    """The plan of calls of `signature`, from the cache where it was made before.

    It holds for the backends of the registry, and for what was timed so far.
    """
    return _plan(signature, registry.BACKENDS, store.generation)


@lru_cache(maxsize=MOST_PLANS)
def _plan(signature: CallSignature, backends: tuple[Backend, ...], generation: int) -> CallPlan | Refusal:
    try:
        check_call(signature)
        request = AttentionRequest.of(signature)
        chosen = choose(request, signature.backend, accelerated_only=signature.accelerated_only)
        if isinstance(chosen, Refusal):
            return chosen
        choices = choices_of(signature.q.device)
        exact = None
        if signature.where_faster and choices is not None:
            exact = _faster_exact(signature, chosen, request, choices)
        if signature.options.mode == EXACT and signature.where_faster:
            return exact or Refusal(UnsupportedError, OWN_IS_FASTER)
        found = exact or CallPlan(signature, chosen, request)
        if signature.options.mode == EXACT or choices is None:
            return found
        found = _beside_peers(signature, chosen, request, found, choices)
        return _unless_own_is_faster(signature, found, choices)
    except (TypeError, ValueError) as error:
        return Refusal(type(error), str(error))


def choose(request: AttentionRequest, name: str | None, *, accelerated_only: bool) -> Backend | Refusal:
    """Who computes calls like `request`.

    name: the only backend that may, or None: the first accelerated one that can, and then the others but for
    `accelerated_only`. ValueError for a name that no backend has.
    """
    if name is not None:
        backend = registry.get(name)
        reason = backend.reason_against(request)
        if reason is None:
            return backend
        text = f"[SA-207] backend {name!r} cannot run this call: {reason}"
        return Refusal(UnsupportedError, text, {name: reason})
    accelerated, reasons = registry.first_able(request, accelerated=True)
    if accelerated is not None:
        return accelerated
    if not accelerated_only:
        other, further = registry.first_able(request, accelerated=False)
        if other is not None:
            return other
        reasons |= further
    if not reasons:
        return Refusal(UnsupportedError, "[SA-112] this installation has no accelerated backend")
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return Refusal(UnsupportedError, f"[SA-207] no backend can run this call: {listed}", reasons)


def _faster_exact(
    signature: CallSignature, chosen: Backend, request: AttentionRequest, choices: TunedChoices
) -> CallPlan | None:
    """The plan of the fastest exact attention, where it was measured to be faster than the call by `chosen`.

    In mode "exact" that is compared with ComfyUI's own attention.
    """
    options = signature.options
    rival = Candidate(PLAIN)
    if options.mode != EXACT:
        rival = Candidate.of(chosen.name, request.options)
        options = options.without_quantization()
    exact = signature._replace(options=options, where_faster=False, peers=IGNORED, accelerated_only=True)
    found = plan(exact)
    if isinstance(found, Refusal) or found.request.work is None:
        return None
    if not choices.is_faster(Candidate(found.backend.name), rival, found.request.work):
        return None
    reason = None if signature.options.mode == EXACT else EXACT_IS_FASTER
    return CallPlan(exact, found.backend, found.request, reason)


def _beside_peers(
    signature: CallSignature, chosen: Backend, request: AttentionRequest, found: CallPlan, choices: TunedChoices
) -> CallPlan:
    """`found`, or the plan of the fastest attention of another package where `signature` allows it.

    chosen: the backend of the mode, against whose error that of the other is held. The reason of the plan names a
    faster one that is not taken.
    """
    work = request.work
    if signature.peers == IGNORED or work is None:
        return found
    mine = Candidate.of(chosen.name, request.options)
    rival = _candidate(found)
    timed = {one.backend: choices.seconds(one, work) for one in choices.peers if choices.is_faster(one, rival, work)}
    reasons = [] if found.reason is None else [found.reason]
    for name in sorted(timed, key=lambda name: timed[name] or 0.0):
        if registry.get(name).reason_against(request) is not None:
            continue
        is_no_less_exact = choices.is_no_less_exact(Candidate(name, PEER), mine, work.head_dim)
        how = "no less exact" if is_no_less_exact else "less exact"
        if signature.peers == NAMED or (signature.peers != ANY and not is_no_less_exact):
            reasons.append(
                f"[SA-320] {name}, {how}, was measured to be faster, and your settings do not let it compute this call"
            )
            continue
        named = signature._replace(backend=name, where_faster=False, peers=IGNORED)
        reason = f"[SA-319] {name}, {how} than {mine.words}, was measured to be faster, and computes this call"
        return CallPlan(named, registry.get(name), request, reason)
    return CallPlan(found.signature, found.backend, found.request, "; ".join(reasons)) if reasons else found


def _unless_own_is_faster(signature: CallSignature, found: CallPlan, choices: TunedChoices) -> CallPlan | Refusal:
    """`found`, or a refusal where the caller's own attention was measured to be faster."""
    work = found.request.work
    if not (signature.where_faster and signature.own_is_torchs) or work is None:
        return found
    if not choices.is_faster(Candidate(PLAIN), _candidate(found), work):
        return found
    return Refusal(UnsupportedError, TORCHS_IS_FASTER)


def _candidate(found: CallPlan) -> Candidate:
    """What the calls of a plan are timed as."""
    if found.backend.is_peer:
        return Candidate(found.backend.name, PEER)
    return Candidate.of(found.backend.name, found.options)


def listed_plan(dense: CallPlan) -> CallPlan | Refusal:
    """The plan of the calls of `dense` with a contiguous block mask of their batch and heads, by the same backend."""
    request = dense.request
    shape = torch.Size((request.batch, request.q_heads, blocks_of(request.q_length), 1 + blocks_of(request.kv_length)))
    lists = TensorForm.contiguous(shape, torch.int16, request.device)
    same_backend = dense.signature._replace(backend=dense.backend.name, where_faster=False, peers=IGNORED)
    return plan(same_backend._replace(block_mask=lists))
