"""One node at work on one model: each attention call is decided, computed and recorded here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ...attention import attention, prepare
from ...call_site import CallSite
from ...options import EXACT
from ...text import error_text
from ..adapter import layers, memory, packs
from ..adapter.attention_call import AttentionCall, Fallback, Form, Override
from . import fidelity, guard, model_pass, quality
from .dispatcher import call_options
from .handler import Handler
from .model_pass import Forward, Schedule
from .record import Decision, Record, Timer, start_timer

log = logging.getLogger("comfy_sage2")

T = TypeVar("T")
TAKEN = "[SA-316] an attention node behind this one, or a pack that took over for this step, took the call"
OUTSIDE = Schedule((1.0, 0.0))  # a pass outside of a sampling: its only step
_MANY_LAYERS = 512  # attention calls of a pass, before the first one has shown how many there are


class NotFinite(ArithmeticError):
    """A backend's output holds NaN or infinity."""


@dataclass(frozen=True)
class Computed:
    """An attention call that was computed.

    Attributes:
        out: the output in the form that the caller expects.
        decision: who computed it.
        timer: stopped when it was enqueued.
        form: the call's, or None when its time says nothing about calls of that form.
        agreement: with full precision, where it was measured.
    """

    out: torch.Tensor
    decision: Decision
    timer: Timer
    form: Form | None
    agreement: torch.Tensor | None = None


class Session:
    """State of one node, kept as long as ComfyUI caches the node's output.

    Attributes:
        handler: what the node does with the calls.
        slot: the node's number, from 0, among the nodes of this kind in a row.
        previous: the override that was installed before, which serves what this node does not, or None.
        record: of the last sampling.
        layers: attention calls of one pass; None until the first pass of a sampling is through.
        can_repeat: whether the guard may have a pass of this sampling made again, as far as the model tells.
        cross_attends: whether the model has cross-attention.
        model: ComfyUI's class of the model that was sampled last.
        prompt: the run of ComfyUI's queue in which that was, or None outside of one.
        evaluations: of the model that samplers have begun, each of one or more passes.
        publish_status: takes what the node has to say after a sampling.
    """

    def __init__(self, handler: Handler, slot: int = 0, previous: Override | None = None) -> None:
        self.handler = handler
        self.slot = slot
        self.previous = previous
        self.record = Record()
        self.layers: int | None = None
        self.can_repeat = True
        self.cross_attends = True
        self.model = ""
        self.prompt: str | None = None
        self.evaluations = 0
        self.publish_status: Callable[[str], None] = lambda text: None
        self._schedule = OUTSIDE
        self._expected_calls = 0  # of a pass: those of the pass before
        self._reported: set[str] = set()
        self._watcher: tuple[Override, Override] | None = None

    def begin_sampling(self, sigmas: Sequence[float], *, can_repeat: bool = True, cross_attends: bool = True) -> None:
        """A sampling over these noise levels starts; see the attributes."""
        self._schedule = Schedule(sigmas)
        self.record.begin_sampling(self._schedule.steps)
        self.handler.begin_sampling(self._schedule.steps)
        self.layers = None
        self.can_repeat = can_repeat
        self.cross_attends = cross_attends

    def end_sampling(self, *, completed: bool = True) -> None:
        """The sampling that began last is over; not `completed`: it failed or was interrupted."""
        self.record.end_sampling(completed=completed)
        self.handler.end_sampling()
        self._schedule = OUTSIDE

    def begin_forward(self, sigma: float, device: torch.device, transformer_options: dict[str, Any]) -> Forward:
        """A forward pass at noise level `sigma` starts on `device`."""
        self.record.begin_forward(start_timer(device), device)
        forward = Forward(self, self._schedule.step(sigma), transformer_options, self.evaluations)
        with memory.unrecorded():  # these tensors live until the pass is through
            if self.handler.guard is not None and guard.can_check(device):
                forward.make_flag(device)
                if self.handler.guard.fidelity is not None:
                    forward.probe = self.handler.guard.fidelity.begin(device)
            if self.handler.measure_quality:
                forward.agreements = torch.empty(self.layers or _MANY_LAYERS, 3, device=device)
        return forward

    def run_forward(self, forward: Forward, model: Callable[[], T]) -> T:
        """The result of `model`, which is the pass that began as `forward`.

        When the guard finds at its end a value that is not finite, the pass is made again with a look at each call.
        """
        checks = self.handler.guard
        with model_pass.running(self.slot, forward):
            out = model()
            if checks is not None and forward.check_at_end and forward.found_nonfinite():
                forward.check_at_end = False
                checks.repeat(forward.step)
                if self.handler.sparsity is not None:
                    self.handler.sparsity.repeat(forward)
                model_pass.restart()
                out = model()
                if isinstance(out, torch.Tensor) and not guard.is_finite(out):
                    checks.repeated_in_vain(forward.step)
        self.end_forward(forward)
        return out

    def end_forward(self, forward: Forward) -> None:
        """The pass is through; raises ValueError when the handler is for another kind of model."""
        if forward.probe is not None:
            forward.probe.finish(forward.step)
        self.record.end_forward(len(forward.calls))
        self._expected_calls = len(forward.calls)
        if forward.calls:
            self.handler.end_pass(forward.calls, first=self.layers is None)
            if self.handler.sparsity is not None:
                self.handler.sparsity.end_pass(forward)
            if self.layers is None:
                self.layers = len(forward.calls)

    def attend(
        self, call: AttentionCall, forward: Forward, fallback: Fallback, options: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """The output of `call` as the caller expects it: from a backend, or else from `fallback`.

        options: ComfyUI's `transformer_options` as the model has set them for this call; None in a compiled model,
            which sets them when it is traced.
        """
        options = options or {}
        site = self._call_site(call, forward, options)
        decision = self.handler.choose(call, site)
        computed = self._compute(call, decision, site, forward, fallback)
        self._record(computed, site, fallback)
        if len(forward.calls) == self._expected_calls and guard.can_check(computed.out.device):
            forward.copy_flag()
        return computed.out

    def watcher(self, taken_by: Override, make: Callable[[], Override]) -> Override:
        """What `make` gives for `taken_by`; the same for the same, as compiled code may have it among its guards."""
        known = self._watcher  # read once: the thread of another GPU may replace it
        if known is None or known[0] is not taken_by:
            known = self._watcher = taken_by, make()
        return known[1]

    def watch(
        self,
        call: AttentionCall,
        forward: Forward,
        run: Fallback,
        owner: str,
        options: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """The output of `run`, another pack's attention on `call`, which counts as its unless it comes back here."""
        seen, device, head_dim = len(forward.calls), call.q.device, call.head_dim
        is_self = layers.is_self_attention(call, options or {}, self.cross_attends)
        call.release()
        timer = start_timer(device)
        out = run()
        timer.stop()
        if len(forward.calls) == seen:
            name = forward.next_call(head_dim, layers.block_of(options or {}), is_self)
            self.record.add(self.record.layer(name), forward.step, Decision(reason=TAKEN, by=owner), timer)
        return out

    def _call_site(self, call: AttentionCall, forward: Forward, options: Mapping[str, Any]) -> CallSite:
        is_self = layers.is_self_attention(call, options, self.cross_attends)
        name = forward.next_call(call.head_dim, layers.block_of(options), is_self)
        layer, (_, kv_length) = self.record.layer(name), call.lengths
        return CallSite(layer, self.layers, forward.step, self._schedule.steps, kv_length, name, is_self)

    def _compute(
        self, call: AttentionCall, decision: Decision, site: CallSite, forward: Forward, fallback: Fallback
    ) -> Computed:
        """The call by the backend of `decision`; by `fallback` when there is none, or it fails, or the guard objects.

        Where the guard objects the handler may know a more exact way, which is tried before.
        """
        form: Form | None = call.form
        timer = start_timer(call.q.device)
        broken: list[str] = []
        while decision.backend is not None:
            try:
                out, decision = self._by_backend(call, decision, site, forward, all_blocks=bool(broken))
            except NotFinite:
                broken.append(decision.label)
                form = None
                decision = self.handler.more_exact(call, decision) or Decision(reason=guard.RECOMPUTED)
            except torch.cuda.OutOfMemoryError:  # torch.OutOfMemoryError by the name that torch 2.4 has too
                raise  # ComfyUI frees memory and tells the user
            except (RuntimeError, ValueError) as error:
                if call.is_released:  # nobody could compute it again
                    raise
                decision = Decision(reason=f"[SA-310] {decision.backend} failed: {error_text(error)}")
                self._warn_once(f"{decision.reason}; ComfyUI's attention serves this call")
            else:
                timer.stop()
                self._count_for_earlier_nodes(forward)
                self._downgrade(site, broken, decision.label, True, in_precise=True)
                agreement = self._compare(out, call, forward) if self.handler.measure_quality else None
                self._sample(out, call, decision, site, forward)
                return Computed(call.output(out), decision, timer, form, agreement)
        call.release()
        out = fallback()
        timer.stop()
        if broken:
            self._downgrade(site, broken, self._fallback_name(), guard.is_finite(out), in_precise=False)
        return Computed(out, replace(decision, by=self._previous_owner()), timer, form)

    def _downgrade(
        self, site: CallSite, broken: list[str], recomputed_by: str, is_finite: bool, *, in_precise: bool
    ) -> None:
        """Tell the guard what gave results that were not finite, if anything did, and who computed the call again."""
        if broken and self.handler.guard is not None:
            served_by = ", then ".join(broken)
            found = guard.Downgrade(site.layer, site.name, site.step, served_by, recomputed_by, is_finite, in_precise)
            self.handler.guard.downgrade(found)

    def _by_backend(
        self, call: AttentionCall, decision: Decision, site: CallSite, forward: Forward, *, all_blocks: bool
    ) -> tuple[torch.Tensor, Decision]:
        """The output in `call.layout`, and how it was made; raises NotFinite when the guard finds it broken at once.

        Inputs in containers that nobody needs later are released as soon as the backend has prepared them.
        """
        assert decision.options is not None  # a backend has options
        # An exact attention's NaN are the model's own, as ComfyUI's are: nothing else could compute the call better.
        quantized = decision.options.mode != EXACT
        device = call.q.device
        guarded = self.handler.guard is not None and quantized and guard.can_check(device)
        flag = forward.nonfinite_flag(device) if guarded else None
        looks_at_each = guarded and flag is None
        samples = quantized and forward.probe is not None and forward.probe.wants(site.layer)
        given: dict[str, Any] = {
            "attn_mask": call.mask_4d(),
            "backend": decision.backend,
            "nonfinite": flag,
            "options": call_options(call, decision.options),
        }
        skipped = None if all_blocks else self._by_lists(call, decision, site, forward, given)
        if skipped is None and call.containers and not (looks_at_each or samples or self.handler.measure_quality):
            attend = prepare(*call.tensors(), **given)
            if attend is not None:
                call.release()
                call.empty_containers()
                return attend()[0], decision
        if skipped is None:
            out: torch.Tensor = attention(*call.tensors(), **given, return_lse=False)
        else:
            out, left_out = skipped
            decision = replace(decision, skips=left_out)
        if looks_at_each and not guard.is_finite(out):
            raise NotFinite
        return out, decision

    def _by_lists(
        self, call: AttentionCall, decision: Decision, site: CallSite, forward: Forward, given: dict[str, Any]
    ) -> tuple[torch.Tensor, bool] | None:
        """The output of a call that finds or skips blocks: see `BlockSparsity.attend`. None is any other call."""
        sparsity, checks = self.handler.sparsity, self.handler.guard
        if sparsity is None or not guard.can_check(call.q.device):
            return None
        if checks is not None and checks.keeps_all_blocks(site.layer):
            return None
        assert decision.backend is not None
        attend = partial(attention, *call.tensors(), **given, return_lse=False)
        return sparsity.attend(attend, call, decision.backend, given["options"], site, forward)

    def _record(self, computed: Computed, site: CallSite, fallback: Fallback) -> None:
        form = computed.form
        self.record.add(
            site.layer, site.step, computed.decision, computed.timer, agreement=computed.agreement, form=form
        )
        if self.handler.measure_quality and form is not None and self.previous is None:
            self._time_comfyui(form, computed.out.device, fallback)

    def _time_comfyui(self, form: Form, device: torch.device, fallback: Fallback) -> None:
        """Once for each form of call that only backends serve: how long ComfyUI's attention takes for it."""
        if self.record.lacks_comparison(form):
            timer = start_timer(device)
            try:
                with memory.unrecorded():
                    fallback()
            except torch.cuda.OutOfMemoryError:
                self._warn_once("the memory does not suffice to time ComfyUI's attention")
                return
            timer.stop()
            self.record.add_comparison(form, timer)

    def _compare(self, out: torch.Tensor, call: AttentionCall, forward: Forward) -> torch.Tensor | None:
        """The agreement of `out`, in `call.layout`, with full precision; None when there is no memory for that."""
        try:
            with memory.unrecorded():
                tensors = (_bhnd(out, call), *call.tensors("BHND"))
                return forward.keep(quality.measure(*tensors, scale=call.scale, mask=call.mask_4d()))
        except torch.cuda.OutOfMemoryError:  # the sampling itself has what it needs
            self._warn_once("the memory does not suffice to compare every call with full precision")
            return None

    def _sample(
        self, out: torch.Tensor, call: AttentionCall, decision: Decision, site: CallSite, forward: Forward
    ) -> None:
        """Compare a few rows of `out`, in `call.layout`, with exact attention where it is this layer's turn."""
        probe = forward.probe
        assert decision.options is not None  # a backend has options
        if probe is None or decision.options.mode == EXACT:
            return
        probe.quantized.append(site.layer)
        if not probe.wants(site.layer) or not guard.can_check(out.device):
            return
        better = replace(decision, skips=False) if decision.skips else self.handler.next_exact(call, decision)
        served = fidelity.SampledCall(
            site.name,
            decision.options.mode,
            decision.label,
            None if better is None or better.options is None else better.options.mode,
            self._left_to() if better is None else f"{better.label}{' with all key blocks' if decision.skips else ''}",
            decision.skips,
        )
        try:
            with memory.unrecorded():
                figures = fidelity.measure(
                    _bhnd(out, call),
                    *call.tensors("BHND"),
                    scale=call.scale,
                    mask=call.mask_4d(),
                    number=probe.number,
                )
                probe.take(site.layer, served, figures)
        except torch.cuda.OutOfMemoryError:  # the sampling itself has what it needs
            self._warn_once("the memory does not suffice for the guard to compare a sample with exact attention")

    def _count_for_earlier_nodes(self, counted: Forward) -> None:
        """Count the last call of `counted` in earlier nodes too: they never see it, but number every call alike."""
        session = getattr(self.previous, "session", None)
        while session is not None:
            forward = model_pass.current(session.slot)
            if forward is not None:
                session.record.layer(forward.count_too(counted))
            session = getattr(session.previous, "session", None)

    def _previous_owner(self) -> str | None:
        """Whose attention serves what this node leaves, in words; None is ComfyUI's."""
        if self.previous is None:
            return None
        if hasattr(self.previous, "session"):
            return "the SageAttention2 node before this one"
        return packs.owner_of(self.previous)

    def _fallback_name(self) -> str:
        return self._previous_owner() or guard.FULL_PRECISION

    def _left_to(self) -> str:
        """Who serves a layer that the guard leaves; without an earlier node it may be an exact attention."""
        return "full precision" if self.previous is None else self._fallback_name()

    def _warn_once(self, text: str) -> None:
        """Failures go to the log, each text once; expected fallbacks stand in the report only."""
        if text not in self._reported:
            self._reported.add(text)
            log.warning("SageAttention2: %s", text)


def _bhnd(out: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """`out`, which is in the call's layout, as (B, H, N, D)."""
    return out if call.layout == "BHND" else out.transpose(1, 2)
