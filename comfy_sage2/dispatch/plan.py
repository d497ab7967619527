"""Decides which backend computes an attention call, once for all calls of one signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NoReturn

import torch

from ..autotune import store
from ..autotune.auto_mode import with_mode
from ..autotune.cost_model import TunedChoices
from ..autotune.store import choices_of
from ..autotune.timings import PEER, PLAIN, REFERENCE, Candidate, Work
from ..backends import hidden_keys
from ..backends.base import Backend
from ..block_mask import blocks_of
from ..call.signature import ANY, IGNORED, NAMED, NO_LESS_EXACT, CallSignature, Routing, TensorForm
from ..call.validation import check_call
from ..options import AUTO, EXACT, GIVEN, AttentionOptions
from . import registry
from .registry import UnsupportedError

EXACT_IS_FASTER = "[SA-314] exact attention was measured to be faster here"
TORCHS_IS_FASTER = "[SA-314] ComfyUI's own attention was measured to be faster here"
HOST_SETS_THE_PACE = (
    "[SA-322] starting a faster attention would cost the CPU more time here than the GPU would save, so ComfyUI's own "
    "attention computes this call"
)
OWN_IS_FASTER = "[SA-314] no exact attention was measured to be faster than ComfyUI's own here"
OTHER_GPU = "[SA-103]"  # begins the reasons of kernels for other GPUs, which say nothing about this one
MOST_PLANS = 1024


class CallPlan:
    """How calls of one signature are computed; none of its options is "auto".

    reason: why another attention replaces the requested mode, or which faster one may not.
    run, prequantize, begin_slices: those of the `BoundCall`; run_reshaped too, or None where the backend has none.
    """

    def __init__(self, signature: CallSignature, backend: Backend, reason: str | None = None) -> None:
        """`backend` must have no reason against `signature`."""
        self.signature = backend.settled(signature)
        self.options: AttentionOptions = self.signature.options
        self.backend = backend
        self.reason = reason
        call = self._call = hidden_keys.bind(backend, self.signature)
        self.run = call.run
        self.prequantize = call.prequantize
        self.begin_slices = call.begin_slices
        self.run_reshaped = call.run_reshaped if call.takes_reshaped else None

    @property
    def plain_bytes(self) -> int:
        """Bytes of q, k, v and the output: what torch's attention has in memory at its peak."""
        call = self.signature
        return 2 * call.q.nbytes + call.k.nbytes + call.v.nbytes

    def peak_bytes(self, *, released: bool = False) -> int | None:
        """Peak memory with q, k, v and the output; None: unknown. released: of a call that begins by `prequantize`."""
        scratch = self._call.scratch_bytes
        return None if scratch is None else self.plain_bytes + scratch[released]

    @property
    def sliced_bytes(self) -> int | None:
        """Peak memory of a call in slices: the output, and the scratch memory for all of q, k and v."""
        scratch = self._call.scratch_bytes  # [True] is less the output's bytes: q, k and v are gone before it is made
        return None if scratch is None else 2 * self.signature.q.nbytes + scratch[True]


@dataclass(frozen=True, eq=False)
class Refusal:
    """Why no call of a signature can be computed: `attention` raises `error` with `text`.

    reasons: backend -> its reason, for each candidate; empty if the call itself is wrong.
    """

    error: type[Exception]
    text: str
    reasons: Mapping[str, str] = field(default_factory=dict)

    def throw(self) -> NoReturn:
        """Raise the error: TypeError or ValueError, such as `UnsupportedError`."""
        raise self.error(self.text)

    @property
    def reason(self) -> str:
        """The reasons in one line for the user: each once, and those of kernels for other GPUs only without others."""
        here = {name: reason for name, reason in self.reasons.items() if not reason.startswith(OTHER_GPU)}
        reasons = here or self.reasons
        distinct = list(dict.fromkeys(reasons.values()))
        if len(distinct) > 1:
            return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return distinct[0] if distinct else self.text


def plan(signature: CallSignature) -> CallPlan | Refusal:
    """The plan of calls of `signature`, cached until the backends or the measured times change."""
    return _plan(signature, registry.BACKENDS, store.generation)


@lru_cache(maxsize=MOST_PLANS)
def _plan(signature: CallSignature, backends: tuple[Backend, ...], generation: int) -> CallPlan | Refusal:
    try:
        check_call(signature)
        signature, routing = with_mode(signature), signature.routing
        chosen = choose(signature)
        choices = choices_of(signature.device)
        if isinstance(chosen, Refusal):
            return _without_kernels(signature, chosen, choices)
        exact = _faster_exact(signature, chosen, choices) if routing.where_faster else None
        if signature.options.mode == EXACT and routing.where_faster:
            return exact or Refusal(UnsupportedError, OWN_IS_FASTER)
        planned = exact or CallPlan(signature, chosen)
        if signature.options.mode == EXACT:
            return planned
        planned = _unless_peer_is_faster(signature, chosen, planned, choices)
        return _unless_own_is_faster(routing, planned, choices)
    except (TypeError, ValueError) as error:
        return Refusal(type(error), str(error))


def choose(signature: CallSignature) -> Backend | Refusal:
    """The backend for such calls: the first candidate that can run them; ValueError for an unknown name."""
    name = signature.routing.backend
    if name is not None:
        backend = registry.get(name)
        reason = backend.reason_against(signature)
        if reason is None:
            return backend
        text = f"[SA-207] backend {name!r} cannot run this call: {reason}"
        return Refusal(UnsupportedError, text, {name: reason})
    reasons: dict[str, str] = {}
    for backend in registry.candidates(signature):  # accelerated ones first
        if backend.accelerated or not signature.routing.accelerated_only:
            reason = backend.reason_against(signature)
            if reason is None:
                return backend
            reasons[backend.name] = reason
    if not reasons:
        return Refusal(UnsupportedError, "[SA-112] this installation has no accelerated backend")
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return Refusal(UnsupportedError, f"[SA-207] no backend can run this call: {listed}", reasons)


def _faster_exact(signature: CallSignature, chosen: Backend, choices: TunedChoices) -> CallPlan | None:
    """The plan of the fastest exact attention if it is faster than `chosen`, or in mode "exact" than ComfyUI's own."""
    options = signature.options
    rival = Candidate(PLAIN)
    if not choices.exact:
        return None
    if options.mode != EXACT:
        rival = Candidate.of(chosen.name, _timed_options(chosen.settled(signature)))
        options = options.without_quantization()
    routing = Routing(signature.routing.backend, accelerated_only=True)
    exact = plan(signature._replace(options=options, routing=routing, rotated_heads=None))
    if isinstance(exact, Refusal):
        return None
    work = Work.of(exact.signature)
    if work is None or not choices.is_faster(Candidate(exact.backend.name), rival, work):
        return None
    reason = None if signature.options.mode == EXACT else EXACT_IS_FASTER
    return CallPlan(exact.signature, exact.backend, reason)


def _without_kernels(signature: CallSignature, refused: Refusal, choices: TunedChoices) -> CallPlan | Refusal:
    """Plan calls that no kernel takes: by the fastest of the exact attentions and the packages allowed for the mode.

    Returns `refused` if none of them was measured to be faster than ComfyUI's own attention.
    """
    routing, work, own = signature.routing, Work.of(signature), Candidate(PLAIN)
    if not (routing.where_faster and routing.own_is_torchs) or routing.backend is not None or work is None:
        return refused
    call = signature._replace(rotated_heads=None)
    calls = {name: call._replace(routing=Routing(name)) for name in (peer.backend for peer in choices.peers)}
    exact = call._replace(options=call.options.without_quantization(), routing=Routing(accelerated_only=True))
    chosen = choose(exact)
    if isinstance(chosen, Backend):
        calls[chosen.name] = exact
    faster = [
        candidate
        for candidate in _candidates_without_kernels(choices, call.options.mode, routing.peers, work.head_dim)
        if candidate.backend in calls
        and choices.is_faster(candidate, own, work)
        and not choices.is_lost_on_the_host(candidate, own, work)
        and registry.get(candidate.backend).reason_against(calls[candidate.backend]) is None
    ]
    if not faster:
        return refused
    name = min(faster, key=lambda candidate: choices.seconds(candidate, work) or 0.0).backend
    reason = f"[SA-323] no kernel takes this call, and {name} was measured to be faster than ComfyUI's own attention"
    return CallPlan(calls[name], registry.get(name), reason)


def serves_without_kernels(device: torch.device, mode: str, peers: str) -> bool:
    """Whether, without kernels, some attention computes any of the timed calls faster than ComfyUI's own."""
    choices = choices_of(device)
    return any(
        choices.is_faster(candidate, Candidate(PLAIN), work)
        for work in dict.fromkeys(work for _, work in choices.times.seconds)
        for candidate in _candidates_without_kernels(choices, mode, peers, work.head_dim)
    )


def _candidates_without_kernels(choices: TunedChoices, mode: str, peers: str, head_dim: int) -> list[Candidate]:
    """What may replace kernels in a mode: exact attentions, and packages that are as exact as the reference."""
    if peers not in (NO_LESS_EXACT, ANY):
        return choices.exact
    rival = Candidate(REFERENCE, "8b" if mode == AUTO else mode)
    allowed = (peer for peer in choices.peers if peers == ANY or choices.is_no_less_exact(peer, rival, head_dim))
    return [*choices.exact, *allowed]


def _unless_peer_is_faster(
    signature: CallSignature, chosen: Backend, planned: CallPlan, choices: TunedChoices
) -> CallPlan:
    """`planned`, or the plan of another package's faster attention if `signature` allows it; else a reason names it.

    chosen: the backend of the mode; its error is compared with that of the package.
    """
    work, rule = Work.of(signature), signature.routing.peers
    if rule == IGNORED or work is None:
        return planned
    mine = Candidate.of(chosen.name, chosen.settled(signature).options)
    rival = _candidate(planned)
    faster = [peer for peer in choices.peers if choices.is_faster(peer, rival, work)]
    timed = {peer.backend: choices.seconds(peer, work) for peer in faster}
    reasons = [] if planned.reason is None else [planned.reason]
    for name in sorted(timed, key=lambda name: timed[name] or 0.0):
        if registry.get(name).reason_against(signature._replace(rotated_heads=None)) is not None:
            continue
        is_no_less_exact = choices.is_no_less_exact(Candidate(name, PEER), mine, work.head_dim)
        how = "no less exact" if is_no_less_exact else "less exact"
        if rule == NAMED or (rule != ANY and not is_no_less_exact):
            reasons.append(
                f"[SA-320] {name}, {how}, was measured to be faster, and your settings do not let it compute this call"
            )
            continue
        reason = f"[SA-319] {name}, {how} than {mine.words}, was measured to be faster, and computes this call"
        return CallPlan(signature._replace(routing=Routing(name), rotated_heads=None), registry.get(name), reason)
    return CallPlan(planned.signature, planned.backend, "; ".join(reasons)) if reasons else planned


def _unless_own_is_faster(routing: Routing, planned: CallPlan, choices: TunedChoices) -> CallPlan | Refusal:
    work = Work.of(planned.signature)
    if not (routing.where_faster and routing.own_is_torchs) or work is None:
        return planned
    own, mine = Candidate(PLAIN), _candidate(planned)
    if choices.is_faster(own, mine, work):
        return Refusal(UnsupportedError, TORCHS_IS_FASTER)
    return Refusal(UnsupportedError, HOST_SETS_THE_PACE) if choices.is_lost_on_the_host(mine, own, work) else planned


def _candidate(planned: CallPlan) -> Candidate:
    """The candidate that stands for the calls of a plan in the times."""
    if planned.backend.is_peer:
        return Candidate(planned.backend.name, PEER)
    return Candidate.of(planned.backend.name, _timed_options(planned.signature))


def _timed_options(signature: CallSignature) -> AttentionOptions:
    """The settled options, but without rotation if later calls reuse the heads of this one: most layers rotate none."""
    keeps_choice = signature.options.rotate == AUTO and signature.rotated_heads is not None
    return replace(signature.options, rotate="off") if keeps_choice else signature.options


def with_rotated_heads(signature: CallSignature) -> CallSignature:
    """`signature` for calls that also return which heads they rotate."""
    shape = torch.Size((signature.batch, signature.kv_heads))
    return signature._replace(rotated_heads=TensorForm.contiguous(shape, torch.int32, signature.device))


def rotated_plan(chooses: CallPlan, *, some: bool, reconsiders: bool = False) -> CallPlan | Refusal:
    """The plan of the calls of `chooses` once their rotated heads are known.

    some: some heads may be rotated, and the calls take them as `rotated_heads`; else they rotate none. reconsiders:
    another attention may replace the backend, as the routing of `chooses` allows; else the backend stays.
    """
    call = chooses.signature
    flags = call.rotated_heads if some else None
    options = replace(call.options, rotate=GIVEN if some else "off")
    routing = call.routing if reconsiders else Routing(chooses.backend.name)
    return plan(call._replace(options=options, routing=routing, rotated_heads=flags))


def listed_plan(dense: CallPlan, *, return_lse: bool = False) -> CallPlan | Refusal:
    """The plan of the calls of `dense` by the same backend, with a contiguous block mask of their batch and heads."""
    call = dense.signature
    shape = torch.Size((call.batch, call.q_heads, blocks_of(call.q_length), 1 + blocks_of(call.kv_length)))
    lists = TensorForm.contiguous(shape, torch.int16, call.device)
    options = replace(call.options, return_lse=return_lse)
    return plan(call._replace(routing=Routing(dense.backend.name), block_mask=lists, options=options))
