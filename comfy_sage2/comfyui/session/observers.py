"""What looks at attention calls after they were computed: each observer sees every call, and changes none."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from ...call.call_site import CallSite
from ..adapter import memory
from ..adapter.attention_call import AttentionCall, Fallback, Override
from . import model_passes, quality
from .guard import Downgrade, Guard, is_finite
from .model_passes import ModelPass
from .record import Decision, Record
from .timer import Timer, start_timer

Warn = Callable[[str], None]


@dataclass(slots=True)
class Computed:
    """An attention call that was computed.

    Attributes:
        call: has let go of q, k and v where nobody measures quality, or `fallback` ran.
        site: where it stands.
        model_pass: its pass.
        fallback: what computes it by the attention that was there before.
        out: the output as the caller expects it.
        decision: who computed it.
        broken: backend and mode of those before it whose output was not finite, in words.
        work: equal for calls that are equal work, and have the same attention without this node; None where
            nobody times calls, or a backend tried in vain before.
        timer: from before the call to when it was enqueued.
    """

    call: AttentionCall
    site: CallSite
    model_pass: ModelPass
    fallback: Fallback
    out: torch.Tensor
    decision: Decision
    broken: Sequence[str]
    work: Hashable | None
    timer: Timer


Observer = Callable[[Computed], None]  # several threads may call


class EarlierNodes:
    """Tells the nodes of this pack before this one of the calls that a backend served.

    They never see such calls, but number every call alike.
    """

    def __init__(self, previous: Override | None) -> None:
        self._previous = previous

    def __call__(self, done: Computed) -> None:
        if done.decision.plan is None:
            return
        session = getattr(self._previous, "session", None)
        while session is not None:
            model_pass = model_passes.current(session.slot)
            if model_pass is not None:
                session.record.layer_numbers[model_pass.count_too(done.model_pass)]
            session = getattr(session.previous, "session", None)


class Downgrades:
    """Tells the guard of layers whose output was not finite, and who computed the call again."""

    def __init__(self, guard: Guard, fallback_name: Callable[[AttentionCall], str]) -> None:
        self._guard = guard
        self._fallback_name = fallback_name

    def __call__(self, done: Computed) -> None:
        if not done.broken:
            return
        again = done.decision.plan is not None
        by = done.decision.label if again else self._fallback_name(done.call)
        failed = Downgrade(
            done.site.layer,
            done.site.name,
            done.site.step,
            ", then ".join(done.broken),
            by,
            again or is_finite(done.out),
            in_precise=again,
        )
        self._guard.downgrade(failed)


class Quality:
    """Compares every call with full precision, and times ComfyUI's attention on calls that backends serve."""

    def __init__(self, record: Record, warn: Warn, *, times_comfyui: bool) -> None:
        """times_comfyui: `Computed.fallback` is ComfyUI's attention, and no earlier node's."""
        self._record = record
        self._warn = warn
        self._times_comfyui = times_comfyui

    def __call__(self, done: Computed) -> None:
        if done.decision.plan is not None:
            self._compare(done)
        if done.work is not None and self._times_comfyui and self._record.lacks_comparison(done.work):
            self._time_comfyui(done, done.work)

    def _compare(self, done: Computed) -> None:
        call = done.call
        try:
            with memory.unrecorded():
                tensors = (call.as_bhnd(done.out), *call.tensors("BHND"))
                agreement = quality.measure(*tensors, scale=call.scale, mask=call.mask_4d())
                self._record.add_agreement(done.site.layer, done.site.step, done.model_pass.keep(agreement))
        except torch.cuda.OutOfMemoryError:  # the sampling itself has what it needs
            self._warn(
                "the GPU has too little free memory to compare every call with full precision. The "
                "report leaves these calls out"
            )

    def _time_comfyui(self, done: Computed, work: Hashable) -> None:
        """Once for each work that only backends serve: how long ComfyUI's attention takes for it."""
        timer = start_timer(done.out.device)
        try:
            with memory.unrecorded():
                done.fallback()
        except torch.cuda.OutOfMemoryError:
            self._warn(
                "the GPU has too little free memory to time ComfyUI's attention. The report may lack the "
                "comparison with it"
            )
            return
        timer.stop()
        self._record.add_comparison(work, timer)


class CallRecorder:
    """Writes every call into the record of the sampling."""

    def __init__(self, record: Record, previous_owner: Callable[[], str | None]) -> None:
        """previous_owner: whose attention `Computed.fallback` is, in words; None is ComfyUI's."""
        self._record = record
        self._previous_owner = previous_owner

    def __call__(self, done: Computed) -> None:
        decision, work, owner = done.decision, done.work, self._previous_owner()
        if decision.plan is None and owner is not None:
            work = None  # the time says nothing about the attention that the model has without nodes
        if decision.plan is None and (owner or done.call.declared) is not None:
            decision = replace(decision, by=owner or done.call.declared)
        self._record.add(done.site.layer, done.site.step, decision, done.timer, work=work)
