"""One node at work on one model: decides for each attention call how it is served, serves it, and records it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...attention import attention
from ...policy.plan import FULL, Choice, FixedPlan, Place, Plan
from ..call import forwards
from ..call.attention_call import HostCall
from ..call.forwards import Forward
from ..report import quality, stopwatch
from ..report.statistics import Form, Outcome, Statistics
from ..schedule import Schedule
from ..settings import Settings
from . import guard
from .selection import Selection, Selector, call_form

log = logging.getLogger("comfy_sage2")

Override = Callable[..., torch.Tensor]
T = TypeVar("T")


class Session:
    """State of one *SageAttention2* node, kept as long as the host caches the node's output.

    Attributes:
        settings: the node's options.
        slot: the node's number, from 0, among the nodes of this kind in a row.
        previous: the override that was installed before, which serves what this node does not, or None.
        expected: what serves ordinary calls on this machine.
        idle_reason: why the node leaves the model as it is, or None when it is at work.
        statistics: the record of the last sampling.
        guard: the layers whose results were not finite in the last sampling.
        plan: decides the mode of each call.
        layers: attention calls of one pass; None until the first pass of a sampling is through.
        task: for the report, what a node does that serves no call; its settings say nothing then.
    """

    task: str | None = None

    def __init__(
        self,
        settings: Settings,
        expected: Selection,
        slot: int = 0,
        previous: Override | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Without a `plan` the settings' mode is taken for every call."""
        self.settings = settings
        self.slot = slot
        self.previous = previous
        self.expected = expected
        self.idle_reason = expected.reason
        self.statistics = Statistics()
        self.guard = guard.Guard()
        self.plan = plan or FixedPlan(Choice(settings.mode, settings.smooth_v))
        self.schedule = Schedule((1.0, 0.0))
        self.layers: int | None = None
        self._selector = Selector(settings.backend)
        self._reported: set[str] = set()

    def begin_sampling(self, sigmas: Sequence[float]) -> None:
        """A sampling over these noise levels starts."""
        self.schedule = Schedule(sigmas)
        self.statistics.reset(self.schedule.steps)
        self.guard.reset()
        self.layers = None

    def begin_forward(self, sigma: float, device: torch.device, transformer_options: dict[str, Any]) -> Forward:
        """A forward pass at noise level `sigma` starts on `device`."""
        self.statistics.begin_forward(stopwatch.start(device), device)
        return Forward(self, self.schedule.step(sigma), transformer_options)

    def run_forward(self, forward: Forward, model: Callable[[], T]) -> T:
        """The result of `model`, which is the pass that began as `forward`.

        When the guard found a value that is not finite at the end of it, it is made again with a look at each call.
        """
        with forwards.running(self.slot, forward):
            out = model()
            if forward.check_at_end and forward.found_nonfinite():
                forward.check_at_end = False
                self.guard.repeat(forward.step)
                forwards.restart()
                out = model()
        self.end_forward(forward)
        return out

    def end_forward(self, forward: Forward) -> None:
        """The pass is through; raises ValueError when the plan is for another kind of model."""
        if self.layers is None and forward.head_dims:
            self.plan.check_pass(forward.head_dims)
            self.layers = len(forward.head_dims)

    def attend(self, call: HostCall, forward: Forward, fallback: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Serve `call` by a backend, or by `fallback` with a recorded reason; the output is as the host expects it."""
        layer = forward.next_layer(call.head_dim)
        watch = stopwatch.start(call.q.device)
        selection, choice = self._select(call, layer, forward.step)
        fidelity = None
        out = None
        guarded = self.settings.guard and guard.can_check(call.q.device)
        flag = forward.nonfinite_flag(call.q.device) if guarded and forward.check_at_end else None
        if selection.backend is not None:
            try:
                out = self._run(call, selection.backend, choice, flag)
            except torch.cuda.OutOfMemoryError:  # torch.OutOfMemoryError by the name that torch 2.4 has too
                raise  # the host frees memory and tells the user
            except (
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # TypeError: a module of another version
                selection = Selection(None, f"{selection.backend} failed: {error}")
                self._warn_once(f"{selection.reason}; the host's own attention serves this call")
        broken_by = None
        if out is not None and guarded and flag is None and not guard.is_finite(out):
            broken_by, out = _outcome(selection, choice).label, None
            selection = Selection(None, guard.RECOMPUTED)
        if out is None:
            out = fallback()
            watch.stop()
            if broken_by is not None:
                self.guard.downgrade(layer, forward.step, broken_by, out)
        else:
            watch.stop()
            self._pass_over(call.head_dim)
            if self.settings.measure_quality:
                fidelity = self._compare(out, call)
            out = call.output(out)
        form = None if broken_by is not None else call_form(call)
        self.statistics.record(layer, forward.step, _outcome(selection, choice), watch, fidelity, form)
        if self.settings.measure_quality and form is not None and self.previous is None:
            self._time_host(call, form, fallback)
        return out

    def _time_host(self, call: HostCall, form: Form, fallback: Callable[[], torch.Tensor]) -> None:
        """Once for each form of call that only backends serve: how long the host takes for it."""
        if self.statistics.lacks_host_time(form):
            watch = stopwatch.start(call.q.device)
            try:
                fallback()
            except torch.cuda.OutOfMemoryError:
                self._warn_once("the memory does not suffice to time the host's own attention")
                return
            watch.stop()
            self.statistics.record_host_time(form, watch)

    def _compare(self, out: torch.Tensor, call: HostCall) -> quality.Quality | None:
        """Compare an output in `call.layout` with full precision; None when there is no memory for that."""
        q, k, v = call.tensors()
        if call.layout == "BNHD":
            out, q, k, v = (tensor.transpose(1, 2) for tensor in (out, q, k, v))
        try:
            return quality.measure(out, q, k, v, scale=call.scale, mask=call.mask_4d())
        except torch.cuda.OutOfMemoryError:  # the sampling itself has what it needs
            self._warn_once("the memory does not suffice to compare every call with full precision")
            return None

    def _pass_over(self, head_dim: int) -> None:
        """Count a call for the nodes before this one, which are not asked for it: a layer is the model's call."""
        session = getattr(self.previous, "session", None)
        while session is not None:
            forward = forwards.current(session.slot)
            if forward is not None:
                forward.next_layer(head_dim)
            session = getattr(session.previous, "session", None)

    def _select(self, call: HostCall, layer: int, step: int) -> tuple[Selection, Choice]:
        """Who computes the call, and how."""
        reason = self._reason_against(call, layer, step)
        if reason is not None:
            return Selection(None, reason), Choice(FULL)
        tokens = call.token_dim
        place = Place(layer, self.layers, step, self.schedule.steps, call.q.shape[tokens], call.k.shape[tokens])
        choice = self.plan.choose(place)
        if choice.mode == FULL:
            return Selection(None, choice.reason), choice
        selection = self._selector.select(call, choice.mode, choice.smooth_v)
        if selection.backend is None and choice.instead is not None:
            selection = self._selector.select(call, choice.instead, choice.smooth_v)
            choice = Choice(choice.instead, choice.smooth_v)
        return selection, choice

    def _reason_against(self, call: HostCall, layer: int, step: int) -> str | None:
        """Why the call must stay with the host whatever its mode, or None."""
        outside = self.settings.reason_for_step(step, self.schedule.steps)
        if outside is not None:
            return outside
        if call.unknown:
            return f"the model passes arguments that this version does not know: {', '.join(call.unknown)}"
        if not call.low_precision:
            return "the model asks for full precision here (low_precision_attention=False)"
        if call.needs_gradient:
            return "the call needs gradients, and quantised attention has none"
        if self.settings.apply_to == "self only" and not call.is_self_attention:
            return "cross-attention, and apply_to is 'self only'"
        return self.guard.reason(layer)

    def _run(self, call: HostCall, backend: str, choice: Choice, nonfinite: torch.Tensor | None) -> torch.Tensor:
        """The attention output in `call.layout`; `nonfinite` is set when it holds NaN or infinity."""
        q, k, v = call.tensors()
        out = attention(
            q,
            k,
            v,
            mode=choice.mode,
            smooth_v=choice.smooth_v,
            scale=call.scale,
            attn_mask=call.mask_4d(),
            layout=call.layout,
            backend=backend,
            nonfinite=nonfinite,
        )
        assert isinstance(out, torch.Tensor)  # no LSE was asked for
        return out

    def _warn_once(self, text: str) -> None:
        """Failures go to the log, each text once; expected fallbacks stand in the report only."""
        if text not in self._reported:
            self._reported.add(text)
            log.warning("SageAttention2: %s", text)


def _outcome(selection: Selection, choice: Choice) -> Outcome:
    if selection.backend is None:
        return Outcome(reason=selection.reason)
    return Outcome(selection.backend, choice.mode, choice.smooth_v)
