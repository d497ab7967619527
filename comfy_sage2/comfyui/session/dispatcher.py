"""The handler of the *SageAttention2* node: for each call the backend and the options, or why it stays with ComfyUI."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from ...autotune.store import choices_of
from ...call_site import CallSite, Layer, indexed_name
from ...options import EXACT, AttentionOptions
from ...plan import Refusal, choose, plan
from ...policy.selector import FixedSelector, ModeSelector
from ...request import AttentionRequest
from ...signature import ANY, IGNORED, NAMED, NO_LESS_EXACT
from ...text import error_text
from ..adapter.attention_call import AttentionCall
from ..settings import ALWAYS, AUTO, AUTO_OR_REFERENCE, FASTEST, FIDELITY, REFERENCE, UNGUARDED, Settings
from .fidelity import Fidelity
from .guard import MORE_EXACT, PRECISE, Guard
from .handler import Handler
from .record import Decision, Summary, decision_of
from .sparsity import BlockSparsity

log = logging.getLogger("comfy_sage2")

OFF = Decision(reason="[SA-301] mode is off")
_EXACT = AttentionOptions(EXACT)


class Dispatcher(Handler):
    """Dispatches calls to backends as `settings` and `selector` say.

    Attributes:
        settings: the node's options.
        expected: how ordinary calls are served on this machine.
        selector: decides the options of each call.
        device: where the model is sampled, or None.
        is_first: no other attention was on the model before, which would serve the calls that this node leaves.
        own_is_torchs: what serves them is torch's attention, whose times are known.
    """

    def __init__(
        self,
        settings: Settings,
        expected: Decision,
        selector: ModeSelector | None = None,
        *,
        device: torch.device | None = None,
        is_first: bool = True,
        own_is_torchs: bool = False,
    ) -> None:
        """Without a `selector` the settings' options are taken for every call."""
        self.settings = settings
        self.expected = expected
        self.selector = selector or FixedSelector(settings.options)
        self.title = settings.describe()
        self.notes = settings.notes
        self.idle_reason = expected.reason
        self.guard = None if settings.guard == UNGUARDED else Guard(Fidelity() if settings.guard == FIDELITY else None)
        self.sparsity = None if settings.sparsity is None else BlockSparsity(settings.sparsity)
        self.measure_quality = settings.measure_quality
        self.traced_as = settings
        self._first_calls = self._shorter = 0  # calls of the first pass, and passes with fewer
        self._failures: set[str] = set()  # that went to the log
        self._outside: list[str | None] = []  # for each step, why the node is not active in it
        self.device = device
        self.is_first = is_first
        self.own_is_torchs = own_is_torchs

    def begin_sampling(self, steps: int) -> None:
        """See `Handler.begin_sampling`."""
        self._first_calls = self._shorter = 0
        if self.guard is not None:
            self.guard.reset()
        if self.sparsity is not None:
            self.sparsity.begin_sampling()

    def end_sampling(self) -> None:
        """See `Handler.end_sampling`."""
        if self.sparsity is not None:
            self.sparsity.end_sampling()

    def choose(self, call: AttentionCall, site: CallSite) -> Decision:
        """See `Handler.choose`."""
        reason = self._reason_against(call, site)
        if reason is not None:
            return self._in_full_precision(call, reason)
        choice = self.selector.choose(site)
        options, instead = choice.options, choice.instead
        if options is None:
            return self._in_full_precision(call, choice.reason)
        least = None
        if self.guard is not None and site.layer in self.guard.restricted:
            least = self.guard.mode(site.layer)
        if least is not None and options.mode in _less_exact(least):
            options, instead = replace(options, mode=least), None
        decision = self._decision(call, options)
        if decision.backend is None and instead is not None:
            return self._decision(call, instead)
        return decision

    def more_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        """See `Handler.more_exact`: mode precise, which has no FP8 values and so none that leave its range."""
        return self._in_modes(call, decision, (PRECISE,))

    def next_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        """See `Handler.next_exact`."""
        return self._in_modes(call, decision, MORE_EXACT)

    def _in_modes(self, call: AttentionCall, decision: Decision, modes: Sequence[str]) -> Decision | None:
        """The decision for `call` in the first of `modes` that is more exact than `decision` and that a backend has."""
        for mode in modes:
            if decision.options is not None and decision.options.mode in _less_exact(mode):
                found = self._decision(call, replace(decision.options, mode=mode))
                if found.options is not None and found.options.mode == mode:
                    return found
        return None

    def _in_full_precision(self, call: AttentionCall, reason: str) -> Decision:
        """Who serves a call that is not to be quantized: an exact attention where that is faster than ComfyUI's."""
        if self._prefers_exact and self.is_first and call.declared is None and call.reason_against_quantizing is None:
            found = self._planned(call, _EXACT, where_faster=True)
            if found.plan is not None:
                return replace(found, reason=reason)
        return Decision(reason=reason)

    @property
    def _prefers_exact(self) -> bool:
        return self.settings.when != ALWAYS and self.settings.backend == AUTO

    @property
    def _peers(self) -> str:
        """What becomes of faster attentions of other packages: of `signature.PEER_RULES`."""
        if self.settings.backend != AUTO:
            return IGNORED
        if self.settings.when == ALWAYS or self.sparsity is not None:  # they leave no key blocks out
            return NAMED
        return ANY if self.settings.when == FASTEST else NO_LESS_EXACT

    def _reason_against(self, call: AttentionCall, site: CallSite) -> str | None:
        """Why the call must stay with ComfyUI whatever the options, or None."""
        outside = self._outside
        if len(outside) != site.steps:  # another sampling, or a pass outside of any
            outside = [self.settings.reason_for_step(step, site.steps) for step in range(site.steps)]
            self._outside = outside
        if outside[site.step] is not None:
            return outside[site.step]
        refused = call.reason_against_quantizing
        if refused is not None:
            return refused
        if self.settings.apply_to == "self only" and not site.is_self:
            return "[SA-303] cross-attention, and 'apply to' is 'self only'"
        if self.settings.respect_model_attention and call.declared is not None:
            return f"[SA-321] the model's file asks for {call.declared}, and respect_model_attention is on"
        if self.guard is None or site.layer not in self.guard.restricted:
            return None
        return self.guard.reason(site.layer)

    def _decision(self, call: AttentionCall, options: AttentionOptions) -> Decision:
        """Who serves `call` with `options`, the node's rotation, and the accumulators that suit the GPU.

        It may be another attention that was measured to be faster, where the node's settings allow it.
        """
        return self._planned(call, options, where_faster=self._prefers_exact and options.mode != EXACT)

    def _planned(self, call: AttentionCall, options: AttentionOptions, *, where_faster: bool) -> Decision:
        try:
            completed = _completed(options, self.settings.rotate, call.scale, call.layout)
            backend = None if self.settings.backend == AUTO else self.settings.backend
            signature = call.signature(
                completed,
                backend=backend,
                where_faster=where_faster,
                peers=self._peers,
                own_is_torchs=self.own_is_torchs and call.declared is None,
            )
            return decision_of(plan(signature))
        except (TypeError, ValueError) as error:
            return Decision(reason=str(error))
        except torch.cuda.OutOfMemoryError:  # ComfyUI frees memory and tells the user
            raise
        except RuntimeError as error:
            reason = f"[SA-310] planning the call failed: {error_text(error)}"
            if reason not in self._failures:
                self._failures.add(reason)
                log.warning("SageAttention2: %s; ComfyUI's attention computes this call", reason)
            return Decision(reason=reason)

    def end_pass(self, calls: Sequence[Layer], first: bool) -> None:
        """See `Handler.end_pass`."""
        if first:
            self.selector.check_pass(calls)
            self._first_calls = len(calls)
        elif len(calls) < self._first_calls and all(call.name == indexed_name(n) for n, call in enumerate(calls)):
            self._shorter += 1

    def status(self) -> str:
        """See `Handler.status`."""
        if self.expected.backend == REFERENCE:
            return f"The slow reference version computes the attention, not a GPU kernel: {self.title}"
        return f"{self.expected.backend} computes the attention: {self.title}"

    def reasoning(self, summary: Summary) -> Sequence[str]:
        """See `Handler.reasoning`."""
        lines = list(self.selector.reasoning(summary.layers, summary.steps))
        choices = None if self.device is None else choices_of(self.device)
        if choices is not None:
            lines += [f"measured on this GPU: {line}" for line in choices.lines()]
        policy, rotate = self.settings.policy, self.settings.rotate
        if policy is not None and self._shorter:
            lines.append(
                f"{self._shorter} of the passes made fewer attention calls than the first, and the model does not say "
                "which blocks it left out, so the policy's choices may have gone to other layers there"
            )
        if policy is not None and policy.rotate != rotate:
            lines.append(
                f"the policy was measured with rotate {policy.rotate}, but this node has rotate {rotate}, so its "
                f"errors are not those measured: set rotate to {policy.rotate}, or measure again"
            )
        return lines


def _less_exact(mode: str) -> tuple[str, ...]:
    return MORE_EXACT[: MORE_EXACT.index(mode)]


def with_backend(device: torch.device, settings: Settings) -> Settings:
    """`settings` with "auto or reference" decided: "reference", and a note, where "auto" serves nothing on `device`."""
    if settings.backend != AUTO_OR_REFERENCE:
        return settings
    automatic = replace(settings, backend=AUTO)
    reason = probe(device, automatic).reason
    if settings.mode == "off" or reason is None:
        return automatic
    note = f"{reason}. The slow reference version runs in place of a kernel: the same result, and no speed-up"
    return replace(settings, backend=REFERENCE, notes=(*settings.notes, note))


def probe(device: torch.device, settings: Settings) -> Decision:
    """How ordinary calls will be served on `device`, or why none can be."""
    if settings.mode == "off":
        return OFF
    options = _completed(settings.options, settings.rotate, None, "BHND")
    request = AttentionRequest.minimal(device, options)
    backend = None if settings.backend == AUTO else settings.backend
    found = choose(request, backend, accelerated_only=True)
    if isinstance(found, Refusal):
        return Decision(reason=found.reason)
    return Decision(found.name, found.settled(request).options)


@lru_cache(maxsize=256)
def _completed(options: AttentionOptions, rotate: str, scale: float | None, layout: str) -> AttentionOptions:
    """A selector's options with what no selector decides, and without a smoothing that has no effect."""
    if options.mode == EXACT:
        return replace(options, scale=scale, layout=layout)
    smooth_v = options.smooth_v and options.mode != PRECISE
    return replace(options, smooth_v=smooth_v, rotate=rotate, pv_accumulator="auto", scale=scale, layout=layout)
