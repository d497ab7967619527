"""The task of the *SageAttention2* node: for each call the backend and the options, or why it stays with ComfyUI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from ... import registry
from ...attention import explain
from ...backends.accumulators import resolved
from ...backends.base import AttentionRequest
from ...options import AttentionOptions
from ...policy.plan import FixedPlan, Place, Plan
from ..call.attention_call import AttentionCall, Form
from ..report.record import Outcome, Summary
from ..settings import Settings
from .guard import LESS_EXACT, PRECISE, Guard
from .task import Task

OFF = Outcome(reason="[SA-301] mode is off")


class Serving(Task):
    """Serves calls as `settings` and `plan` say.

    Attributes:
        settings: the node's options.
        expected: how ordinary calls are served on this machine.
        plan: decides the options of each call.
    """

    def __init__(self, settings: Settings, expected: Outcome, plan: Plan | None = None) -> None:
        """Without a `plan` the settings' options are taken for every call."""
        self.settings = settings
        self.expected = expected
        self.plan = plan or FixedPlan(settings.options)
        self.title = settings.describe()
        self.idle_reason = expected.reason
        self.guard = Guard() if settings.guard else None
        self.measure_quality = settings.measure_quality
        self.traced_as = settings
        self._outside: list[str | None] = []  # for each step, why the node is not active in it
        self._known: dict[tuple[Form, AttentionOptions], Outcome] = {}

    def begin_sampling(self, steps: int) -> None:
        """See `Task.begin_sampling`."""
        if self.guard is not None:
            self.guard.reset()

    def choose(self, call: AttentionCall, place: Place) -> Outcome:
        """See `Task.choose`."""
        reason = self._reason_against(call, place)
        if reason is not None:
            return Outcome(reason=reason)
        choice = self.plan.choose(place)
        options, instead = choice.options, choice.instead
        if options is None:
            return Outcome(reason=choice.reason)
        if self.guard is not None and self.guard.is_precise(place.layer):
            options, instead = replace(options, mode=PRECISE), None
        outcome = self._outcome(call, options)
        if outcome.backend is None and instead is not None:
            return self._outcome(call, instead)
        return outcome

    def more_exact(self, call: AttentionCall, outcome: Outcome) -> Outcome | None:
        """See `Task.more_exact`: mode precise, which has no FP8 values and so none that leave its range."""
        if outcome.options is None or outcome.options.mode not in LESS_EXACT:
            return None
        found = self._outcome(call, replace(outcome.options, mode=PRECISE))
        return found if found.options is not None and found.options.mode == PRECISE else None

    def _reason_against(self, call: AttentionCall, place: Place) -> str | None:
        """Why the call must stay with ComfyUI whatever the options, or None."""
        outside = self._outside
        if len(outside) != place.steps:  # another sampling, or a pass outside of any
            outside = [self.settings.reason_for_step(step, place.steps) for step in range(place.steps)]
            self._outside = outside
        if outside[place.step] is not None:
            return outside[place.step]
        refused = call.reason_against_quantizing
        if refused is not None:
            return refused
        if self.settings.apply_to == "self only" and place.q_length != place.kv_length:
            return "[SA-303] cross-attention, and apply_to is 'self only'"
        return None if self.guard is None else self.guard.reason(place.layer)

    def _outcome(self, call: AttentionCall, options: AttentionOptions) -> Outcome:
        """Who serves `call` with `options`; decided once for all calls of one form.

        The outcome has the node's rotation, and the accumulators that suit the card: plans choose neither of them.
        """
        key = (call.form, options)
        outcome = self._known.get(key)
        if outcome is None:
            options = _completed(options, self.settings, call.q.device)
            outcome = self._known[key] = _picked(_explained(call, options), self.settings.backend, options)
        return outcome

    def end_pass(self, head_dims: Sequence[int], first: bool) -> None:
        """See `Task.end_pass`."""
        if first:
            self.plan.check_pass(head_dims)

    def status(self) -> str:
        """See `Task.status`."""
        return f"{self.expected.backend} serves the attention: {self.title}"

    def reasoning(self, summary: Summary) -> Sequence[str]:
        """See `Task.reasoning`."""
        lines = self.plan.reasoning(summary.layers, summary.steps)
        policy, rotate = self.settings.policy, self.settings.rotate
        if policy is None or policy.rotate == rotate:
            return lines
        measured = f"the policy was measured {'with' if policy.rotate else 'without'} rotation"
        return (
            *lines,
            f"{measured}, and rotate is {'on' if rotate else 'off'} here: its errors are not those measured",
        )


def probe(device: torch.device, settings: Settings) -> Outcome:
    """How ordinary calls will be served on `device`, or why none can be."""
    if settings.mode == "off":
        return OFF
    options = _completed(settings.options, settings, device)
    return _picked(registry.explain(AttentionRequest.ordinary(device, options)), settings.backend, options)


def _completed(options: AttentionOptions, settings: Settings, device: torch.device) -> AttentionOptions:
    """A plan's options with what no plan decides, and without a smoothing that has no effect."""
    smooth_v = options.smooth_v and options.mode != PRECISE
    return resolved(replace(options, smooth_v=smooth_v, rotate=settings.rotate, pv_accumulator="auto"), device)


def call_options(call: AttentionCall, options: AttentionOptions) -> AttentionOptions:
    """`options` with what the call decides for itself."""
    return _with(options, call.scale, call.layout)


@lru_cache(maxsize=256)
def _with(options: AttentionOptions, scale: float | None, layout: str) -> AttentionOptions:
    return replace(options, scale=scale, layout=layout)


def _explained(call: AttentionCall, options: AttentionOptions) -> dict[str, str | None] | str:
    """For each backend what it says to the call; input that the attention API refuses gives its error alone."""
    try:
        return explain(*call.tensors(), attn_mask=call.mask_4d(), options=call_options(call, options))
    except (TypeError, ValueError) as error:
        return str(error)


def _picked(explained: dict[str, str | None] | str, backend: str, options: AttentionOptions) -> Outcome:
    """The first candidate of `backend`, the user's choice, that has no reason against it."""
    if isinstance(explained, str):
        return Outcome(reason=explained)
    if backend == "auto":
        candidates = {b.name: explained[b.name] for b in registry.backends() if b.accelerated and b.name in explained}
    else:
        candidates = {backend: explained[backend]}
    for name, reason in candidates.items():
        if reason is None:
            return Outcome(name, options)
    return Outcome(
        reason=_joined(candidates) if candidates else "[SA-112] this installation has no accelerated backend"
    )


def _joined(reasons: dict[str, str | None]) -> str:
    """The reasons of several backends in one line; a reason that all share stands once."""
    distinct = set(reasons.values())
    if len(distinct) == 1:
        return str(distinct.pop())
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
