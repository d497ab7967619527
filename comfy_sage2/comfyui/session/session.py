"""One node running on one model: a session decides, computes and records each attention call."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ...backends.base import Slices
from ...call.call_site import CallSite
from ...system.readback import Readback, copied
from ..adapter import memory, packs
from ..adapter.attention_call import AttentionCall, Fallback, Override
from ..adapter.declared_attention import NONE_DECLARED, DeclaredLayers
from ..adapter.layers import block_of, is_self_attention
from . import guard, model_passes, quality
from .dispatcher import Dispatcher
from .guard import Downgrade
from .model_passes import ModelPass, Schedule
from .record import Decision
from .recorder import Recorder
from .runner import compute, compute_slices
from .timer import NO_TIMER, Timer, start_timer

log = logging.getLogger("comfy_sage2")

T = TypeVar("T")
TAKEN = "[SA-316] another attention node or pack computed this call"
OUTSIDE = Schedule((1.0, 0.0))  # of a pass outside of a sampling: one step
_MANY_LAYERS = 512  # expected attention calls of a sampling's first pass


class Session:
    """State of one node, kept as long as ComfyUI caches the node's output.

    Attributes:
        slot: the node's number, from 0, in the chain of nodes of this kind.
        previous: the override that was installed before, which serves the calls that this node leaves, or None.
        layers: attention calls of one pass; None until the first pass of a sampling has ended.
        can_repeat: whether the guard may repeat a pass of this sampling, as far as the models show.
        models: the ids of the diffusion models that were inspected in this sampling.
        declared: what the model's file asks for; read when the node runs, and again in a sampling's first pass.
        compiled: the last sampling ran the model as compiled code, from which `declared` cannot be read.
        prompt: the id of the run of ComfyUI's queue that the last sampling was in, or None outside of a run.
        pack_in_model: a pack whose own functions were around the model or in it in the last sampling, or None.
        model_layers: attention layers of a model that has a pack's functions in it; 0 if they were not counted.
        evaluations: how many evaluations of the model samplers have begun; each takes one or more passes.
        wholes: why calls that could have come in slices came as wholes, and how many.
        sliced_feed_forwards: the token counts at which a feed-forward module found no memory for the whole.
    """

    def __init__(self, dispatcher: Dispatcher, slot: int = 0, previous: Override | None = None) -> None:
        self.dispatcher = dispatcher
        self.slot = slot
        self.previous = previous
        self.record = Recorder()
        self.layers: int | None = None
        self.can_repeat = True
        self.models: set[int] = set()
        self.cross_attends = True
        self.model = ""
        self.declared: DeclaredLayers = NONE_DECLARED
        self.compiled = False
        self.prompt: str | None = None
        self.pack_in_model: str | None = None
        self.model_layers = 0
        self.evaluations = 0
        self.measures_quality = False
        self.wholes: Counter[str] = Counter()
        self.sliced_feed_forwards: set[int] = set()
        self._no_slices: dict[Hashable, str] = {}  # form -> why its calls take no slices; None: why no call does
        self.publish_status: Callable[[], None] = lambda: None
        self._schedule = OUTSIDE
        self._expected_calls = 0  # of a pass: as many as in the pass before
        self._follows_node = hasattr(previous, "session")  # another node of this pack
        self._watcher: tuple[Override, Override] | None = None

    def begin_sampling(
        self,
        sigmas: Sequence[float],
        *,
        can_repeat: bool = True,
        times_calls: bool = True,
        measures_quality: bool = False,
    ) -> None:
        """Start a sampling over these noise levels; see the attributes here and of `Recorder`."""
        self._schedule = Schedule(sigmas)
        self.record.begin_sampling(self._schedule.steps, times_calls=times_calls or measures_quality)
        self.dispatcher.begin_sampling()
        self.measures_quality = measures_quality
        self.layers = None
        self.can_repeat = can_repeat
        self.models.clear()
        self.cross_attends = True
        self.pack_in_model, self.model_layers = None, 0
        self.wholes.clear()
        self.sliced_feed_forwards.clear()
        self._no_slices.clear()

    def end_sampling(self, *, completed: bool = True) -> None:
        """End the sampling that began last. completed: False if it failed or was interrupted."""
        self.record.end_sampling(completed=completed)
        self.dispatcher.end_sampling()
        self._schedule = OUTSIDE

    @property
    def leaves_to_declared(self) -> bool:
        """Whether the declared attention serves what this node leaves: no earlier override, no compiled code."""
        is_first = self.previous is None and not self.compiled
        return bool(self.declared.served) and is_first

    def begin_pass(
        self, sigma: float | torch.Tensor, device: torch.device, transformer_options: dict[str, Any]
    ) -> ModelPass:
        """sigma: the noise level. The host waits for the value of a tensor (1,) only when a call needs the step."""
        self.record.begin_pass(start_timer(device), device)
        with memory.unrecorded():  # these tensors live until the pass ends
            level = copied(sigma) if isinstance(sigma, torch.Tensor) else sigma
            model_pass = ModelPass(self, self._schedule, level, transformer_options, self.evaluations, device)
            if self.dispatcher.guard is not None and model_passes.can_read_back(device):
                model_pass.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
                model_pass.flag = Readback(1, torch.int32, device)
            if self.measures_quality:
                model_pass.agreements = torch.empty(self.layers or _MANY_LAYERS, 3, dtype=torch.float32, device=device)
        return model_pass

    def run_pass(self, model_pass: ModelPass, model: Callable[[], T]) -> T:
        """The result of `model`; if the guard finds NaN or infinity, of a second run that checks each call."""
        checks = self.dispatcher.guard
        with model_passes.running(self.slot, model_pass):
            out = model()
            if checks is not None and model_pass.check_at_end and model_pass.found_nonfinite():
                model_pass.check_at_end = False
                checks.repeated.append(model_pass.step)
                if self.dispatcher.sparsity is not None:
                    self.dispatcher.sparsity.repeat(model_pass)
                if self.dispatcher.rotations is not None:
                    self.dispatcher.rotations.repeat(model_pass.step)
                model_passes.restart()
                downgraded_before = len(checks.downgraded)
                out = model()
                if model_pass.has_slices and len(checks.downgraded) == downgraded_before:
                    self._no_slices[None] = "[SA-324] values of a slice were much larger than those of the first one"
                if isinstance(out, torch.Tensor) and not guard.is_finite(out):
                    checks.repeated_in_vain(model_pass.step)
        self.end_pass(model_pass)
        return out

    def end_pass(self, model_pass: ModelPass) -> None:
        model_pass.settle()
        self.record.end_pass(len(model_pass.calls), packs.block_owner(model_pass.transformer_options))
        self._expected_calls = len(model_pass.calls)
        if self.dispatcher.rotations is not None:
            self.dispatcher.rotations.end_pass(model_pass.device)
        if model_pass.calls:
            if self.dispatcher.sparsity is not None:
                self.dispatcher.sparsity.end_pass(model_pass)
            if self.layers is None:
                self.layers = len(model_pass.calls)

    def takes_slices(self, model_pass: ModelPass, device: torch.device, key: Hashable) -> bool:
        """Whether calls of this pass may come in slices; if not, notes why. key: equal for calls of equal form.

        It notes nothing for steps in which the node is not active.
        """
        if self.dispatcher.reason_outside(model_pass.step, self._schedule.steps) is not None:
            return False
        reason = self._no_slices.get(key) or self._no_slices.get(None)
        if reason is None:
            if self.measures_quality:
                reason = "[SA-324] the report compares them with full precision"
            elif self.dispatcher.sparsity is not None:
                reason = "[SA-324] `sparse` looks at all of q and k at once"
            elif self.leaves_to_declared:
                reason = "[SA-324] the model's file asks for another attention"
            elif model_pass.nonfinite_flag(device) is None:
                reason = "[SA-324] the guard, which checks that slices fit the first one, is off or checks each call"
            else:
                return True
        self.note_whole(reason)
        return False

    def note_whole(self, reason: str) -> None:
        """Note that a call comes as a whole although it could come in slices."""
        self.wholes[reason] += 1

    def attend_slices(
        self,
        call: AttentionCall,
        model_pass: ModelPass,
        feed: Callable[[Slices], None],
        plain: Fallback,
        options: Mapping[str, Any],
        key: Hashable,
    ) -> bool:
        """Compute a call in slices, and return whether that worked. If not, the call comes again, as a whole.

        feed: as in `compute_slices`. plain: does the same with ComfyUI's attention, including the projections.
        """
        site, device = self._call_site(call, model_pass, options), call.q.device
        chosen, rotated_heads = self._chosen(call, site, model_pass.model)
        work = self._timed_work(call, chosen, plain, model_pass)
        timer = self._start_timer(model_pass, device)
        decision = compute_slices(call, chosen, model_pass, feed, rotated_heads)
        if not decision.in_slices:
            model_pass.take_back()
            self._no_slices[key] = decision.label
            self.note_whole(decision.label)
            return False
        if self.dispatcher.rotations is not None and rotated_heads is not None:
            self.dispatcher.rotations.ran(chosen, site, model_pass.model)
        if timer is not NO_TIMER:
            timer.stop()
        model_pass.has_slices = True
        self._note(decision, site, timer, work, model_pass)
        return True

    def attend(
        self, call: AttentionCall, model_pass: ModelPass, fallback: Fallback, options: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """The output of `call` as the caller expects it: from a backend, or else from `fallback`.

        options: ComfyUI's `transformer_options` of this call; None in a compiled model, which sets them in its trace.
        """
        site = self._call_site(call, model_pass, options or {})
        device = call.q.device
        rotations = self.dispatcher.rotations
        chosen, rotated_heads = self._chosen(call, site, model_pass.model)
        work = self._timed_work(call, chosen, fallback, model_pass)
        timer = self._start_timer(model_pass, device)
        out, decision, broken = compute(call, chosen, site, model_pass, fallback, rotated_heads)
        if rotations is not None and rotated_heads is not None and not broken and decision.plan is chosen.plan:
            rotations.ran(chosen, site, model_pass.model)
        if timer is not NO_TIMER:
            timer.stop()
        if broken or (decision.plan is None and chosen.plan is not None):
            work = None  # the call was computed twice, or a backend tried first
        if decision.plan is None:
            owner = self._previous_owner()
            if owner is not None:
                work = None  # the time says nothing about the attention that the model has without nodes
            by = owner or call.declared
            decision = decision if by is None else replace(decision, by=by)
        if broken and self.dispatcher.guard is not None:
            in_precise = decision.plan is not None
            by = decision.label if in_precise else decision.by or guard.FULL_PRECISION
            is_finite = in_precise or guard.is_finite(out)
            self.dispatcher.guard.downgrade(Downgrade(site, ", then ".join(broken), by, is_finite, in_precise))
        self._note(decision, site, timer, work, model_pass)
        if self.measures_quality and decision.plan is not None:
            quality.compare(call, out, site, model_pass)
        return out

    def _chosen(self, call: AttentionCall, site: CallSite, model: int) -> tuple[Decision, torch.Tensor | None]:
        chosen, rotations = self.dispatcher.choose(call, site), self.dispatcher.rotations
        return (chosen, None) if rotations is None else rotations.decided(chosen, site, model)

    def _note(
        self, decision: Decision, site: CallSite, timer: Timer, work: Hashable | None, model_pass: ModelPass
    ) -> None:
        if decision.plan is not None and self.slot:
            self._tell_earlier_nodes(model_pass)
        self.record.add(site.layer, site.step, decision, timer, work=work)
        if len(model_pass.calls) == self._expected_calls:
            model_pass.copy_flag()

    def _tell_earlier_nodes(self, model_pass: ModelPass) -> None:
        """Count the call in earlier nodes: they never see it if a backend serves it here, but must number it alike."""
        for earlier_pass in map(model_passes.current, range(self.slot)):
            if earlier_pass is not None:
                earlier_pass.session.record.layer_of(earlier_pass.count_too(model_pass))

    def _timed_work(
        self, call: AttentionCall, chosen: Decision, fallback: Fallback, model_pass: ModelPass
    ) -> Hashable | None:
        """The form of a call to be timed. Also times `fallback` on some calls, if it is ComfyUI's attention."""
        if not self.record.times_calls:
            return None
        is_comparable = chosen.plan is not None and self.previous is None
        if is_comparable and self.record.wants_comparison(call.form) and model_passes.can_read_back(call.q.device):
            quality.time_comfyui(call, fallback, model_pass)
        return call.form

    def _start_timer(self, model_pass: ModelPass, device: torch.device) -> Timer:
        """Start timing a call on `device`, if its step is in the sample that a report reads."""
        return start_timer(device) if self.record.times_step(model_pass.step) else NO_TIMER

    def watcher(self, taken_by: Override, make: Callable[[], Override]) -> Override:
        """What `make` returns for `taken_by`; the same object each time, as compiled code may guard on it."""
        known = self._watcher  # read once: the thread of another GPU may replace it
        if known is None or known[0] is not taken_by:
            known = self._watcher = taken_by, make()
        return known[1]

    def watch(
        self,
        call: AttentionCall,
        model_pass: ModelPass,
        run: Fallback,
        owner: str,
        options: Mapping[str, Any] | None,
    ) -> torch.Tensor:
        """Run another pack's attention. Record the call as that pack's, unless the pack gave it back to this node."""
        calls_before, device = len(model_pass.calls), call.q.device
        is_self = is_self_attention(call, options or {}, self.cross_attends)
        call.release()
        timer = self._start_timer(model_pass, device)
        out = run()
        timer.stop()
        if len(model_pass.calls) == calls_before:
            name = model_pass.next_call(block_of(options or {}), is_self)
            self.record.add(self.record.layer_of(name), model_pass.step, Decision(reason=TAKEN, by=owner), timer)
        return out

    def _call_site(self, call: AttentionCall, model_pass: ModelPass, options: Mapping[str, Any]) -> CallSite:
        is_self = is_self_attention(call, options, self.cross_attends)
        name = model_pass.next_call(block_of(options), is_self)
        return CallSite(self.record.layer_of(name), model_pass.step, self._schedule.steps, name, is_self)

    def _previous_owner(self) -> str | None:
        """Who serves the calls that this node leaves, in words; None means ComfyUI's attention."""
        if self.previous is None:
            return None
        if self._follows_node:
            return "the SageAttention2 node before this one"
        return packs.owner_of(self.previous)
