"""The decision about each call of a node: the backend and the options, or why the call stays with ComfyUI."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from ...autotune import store
from ...autotune.auto_mode import auto_mode, with_mode
from ...autotune.store import choices_of
from ...call.call_site import CallSite
from ...call.signature import ANY, IGNORED, NAMED, NO_LESS_EXACT, CallSignature, Routing
from ...dispatch import registry
from ...dispatch.plan import MOST_PLANS, Refusal, choose, plan, serves_without_kernels, with_rotated_heads
from ...options import EXACT, MODES, AttentionOptions
from ...system.memory import is_out_of_memory
from ...text import error_text
from ..adapter.attention_call import AttentionCall
from ..settings import ALWAYS, AUTO, AUTO_OR_REFERENCE, FASTEST, REFERENCE, SPARSE_OFF, Settings
from .guard import DOWNGRADED, LESS_EXACT, PRECISE, Downgrade, Guard
from .record import Decision, decision_of
from .rotation import Rotations
from .sparsity import BlockSparsity

log = logging.getLogger("comfy_sage2")

OFF = Decision(reason="[SA-301] mode is off")
_FASTER_EXACT = Routing(accelerated_only=True, where_faster=True)


class Dispatcher:
    """Dispatches calls to backends as `settings` say.

    Attributes:
        expected: how ordinary calls are served on this machine.
        idle_reason: why the node leaves the model unchanged, or None if it is active, with or without kernels.
        guard, sparsity, rotations: None if no output is checked, no block skipped, or no choice of heads kept.
        device: the device that samples the model, or None.
        routing: of the calls in the node's mode.
    """

    def __init__(
        self,
        settings: Settings,
        expected: Decision,
        *,
        device: torch.device | None = None,
        is_first: bool = True,
        own_is_torchs: bool = False,
    ) -> None:
        """is_first: ComfyUI's attention serves what the node leaves. own_is_torchs: it is torch's, with known times."""
        self.settings = settings
        self.expected = expected
        self.title = settings.describe()
        self.guard = Guard() if settings.guard else None
        skips = settings.sparse != SPARSE_OFF
        self.sparsity = BlockSparsity(settings.sparse, settings.dense_percent) if skips else None
        expected_backend = None if expected.backend is None else registry.get(expected.backend)
        takes_heads = expected_backend is not None and expected_backend.takes_rotated_heads
        self.rotations = Rotations() if settings.rotate == AUTO and takes_heads else None
        self.device = device
        backend = None if settings.backend == AUTO else settings.backend
        prefers_exact = settings.when != ALWAYS and backend is None
        self.routing = Routing(
            backend,
            accelerated_only=backend is None,
            where_faster=prefers_exact and settings.mode != EXACT,
            peers=_peers(settings),
            own_is_torchs=own_is_torchs,
        )
        # Where no kernel can run, faster attentions of torch or of other packages may compute the calls.
        asks = expected.reason is not None and settings.mode != "off" and self.routing.where_faster and own_is_torchs
        others_serve = asks and device is not None and serves_without_kernels(device, settings.mode, self.routing.peers)
        self.idle_reason = None if others_serve else expected.reason
        self._routing_of_declared = self.routing._replace(own_is_torchs=False)
        self._takes_exact = prefers_exact and is_first  # exact backends may serve calls in full precision
        self._options = {mode: settings.options(mode) for mode in (*MODES, AUTO, EXACT)}
        self._auto_calls: dict[int, torch.dtype] = {}  # head_dim -> dtype of calls in mode auto, for the report
        self._failures = 0  # calls that could not be planned
        self._logged: set[str] = set()
        # The generation of the timings and the backends, and the decisions that hold for these. The key of a decision,
        # a call's form and what else it depends on, is smaller than that of the plan cache.
        self._chosen: tuple[object, dict[tuple[Hashable, ...], Decision]] = (None, {})
        self._outside: list[str | None] = []  # for each step, why the node is inactive in it

    def begin_sampling(self) -> None:
        if self.guard is not None:
            self.guard = Guard()
        if self.sparsity is not None:
            self.sparsity = BlockSparsity(self.settings.sparse, self.settings.dense_percent, active=True)
        if self.rotations is not None:
            self.rotations = Rotations(active=True)

    def end_sampling(self) -> None:
        """End the sampling; later passes of the model belong to none."""
        if self.sparsity is not None:
            self.sparsity.end_sampling()
        if self.rotations is not None:
            self.rotations = Rotations()

    def choose(self, call: AttentionCall, site: CallSite) -> Decision:
        """How to serve a call; decided once for each form, step range, measurement and downgrade."""
        outside = self.reason_outside(site.step, site.steps)
        downgrade = None if self.guard is None else self.guard.downgraded.get(site.layer)
        if not call.form.is_repeatable or call.needs_gradient:
            return self._choose(call, site, outside, downgrade)
        generation = store.generation, registry.BACKENDS
        decided_in, decisions = self._chosen  # read once: another thread may replace it
        if decided_in != generation or len(decisions) > MOST_PLANS:
            decisions = {}
            self._chosen = generation, decisions
        key = call.form, site.is_self, outside, downgrade and downgrade.in_precise
        decision = decisions.get(key)
        if decision is None:
            failures = self._failures
            decision = self._choose(call, site, outside, downgrade)
            if self._failures == failures:  # a call that failed may succeed later
                decisions[key] = decision
        return decision

    def _choose(
        self, call: AttentionCall, site: CallSite, outside: str | None, downgrade: Downgrade | None
    ) -> Decision:
        reason = outside or self._reason_against(call, site)
        if reason is None and downgrade is not None and not downgrade.in_precise:
            reason = DOWNGRADED
        if reason is not None:
            return self._in_full_precision(call, reason)
        mode = self.settings.mode
        if downgrade is not None and mode in (AUTO, *LESS_EXACT):
            mode = PRECISE
        decision = self._planned(call, self._options[mode])
        if mode == AUTO and decision.plan is not None:
            self._auto_calls.setdefault(decision.plan.signature.head_dim, decision.plan.signature.dtype)
        return decision

    def more_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        """How to recompute `call` after the backend of `decision` gave a result that is not finite.

        Mode precise recomputes it: it has no FP8 values, so none can leave FP8's range. None leaves the call to the
        attention that was installed before the node.
        """
        if decision.options is None or decision.options.mode not in LESS_EXACT:
            return None
        precise = self._planned(call, self._options[PRECISE])
        return precise if precise.options is not None and precise.options.mode == PRECISE else None

    def _in_full_precision(self, call: AttentionCall, reason: str) -> Decision:
        """Who serves a call that must not be quantized: an exact attention if that is faster than ComfyUI's."""
        if self._takes_exact and call.declared is None and call.reason_against_quantizing is None:
            exact = self._planned(call, self._options[EXACT], _FASTER_EXACT)
            if exact.plan is not None:
                return replace(exact, reason=reason)
        return Decision(reason=reason)

    def reason_outside(self, step: int, steps: int) -> str | None:
        """Why the node is not active in `step` of `steps`, or None."""
        outside = self._outside
        if len(outside) != steps:  # another sampling, or a pass outside of any
            outside = [self.settings.reason_for_step(step, steps) for step in range(steps)]
            self._outside = outside
        return outside[step]

    def _reason_against(self, call: AttentionCall, site: CallSite) -> str | None:
        """Why the call must stay with ComfyUI in every step, whatever the options, or None."""
        refused = call.reason_against_quantizing
        if refused is not None:
            return refused
        if self.settings.apply_to == "self only" and not site.is_self:
            return "[SA-303] cross-attention, and 'apply to' is 'self only'"
        if self.settings.respect_model_attention and call.declared is not None:
            return f"[SA-321] the model's file asks for {call.declared}, and respect_model_attention is on"
        return None

    def _planned(self, call: AttentionCall, options: AttentionOptions, routing: Routing | None = None) -> Decision:
        """Who serves `call` with `options`; if the routing allows it, an attention that was measured to be faster."""
        if routing is None:
            routing = self.routing if call.declared is None else self._routing_of_declared
        try:
            signature = call.signature(replace(options, scale=call.scale, layout=call.layout), routing)
            if self.rotations is not None and options.mode != EXACT:
                signature = with_rotated_heads(signature)
            return decision_of(plan(signature))
        except (TypeError, ValueError) as error:
            return Decision(reason=str(error))
        except RuntimeError as error:
            if is_out_of_memory(error):  # ComfyUI frees memory and tells the user
                raise
            reason = f"[SA-310] planning the call failed: {error_text(error)}"
            self._failures += 1
            self.warn_once(f"{reason}; ComfyUI's attention computes this call")
            return Decision(reason=reason)

    def warn_once(self, text: str) -> None:
        """Log a failure, each text once. Expected fallbacks appear only in the report."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning("SageAttention2: %s", text)

    def status(self) -> str:
        if self.expected.reason is not None:
            return (
                f"No kernel runs here: {self.expected.reason}. Attentions that were measured to be faster than "
                f"ComfyUI's own, and are exact enough, compute the calls: {self.title}"
            )
        if self.expected.backend == REFERENCE:
            return f"The slow reference version computes the attention, not a GPU kernel: {self.title}"
        return f"{self.expected.backend} computes the attention: {self.title}"

    def reasoning(self) -> Sequence[str]:
        """For the report, why the calls were served as they were."""
        if self.device is None:
            return ()
        lines = []
        for head_dim, dtype in self._auto_calls.items():
            decided = auto_mode(self._options[AUTO], self.device, dtype, head_dim)
            lines.append(f"auto at head_dim {head_dim}: {decided.reason}")
        return [*lines, *(f"measured on this GPU: {line}" for line in choices_of(self.device).lines())]


def _peers(settings: Settings) -> str:
    """How to treat faster attentions of other packages: one of `signature.PEER_RULES`."""
    if settings.backend != AUTO:
        return IGNORED
    if settings.when == ALWAYS or settings.sparse != SPARSE_OFF:  # they skip no key blocks
        return NAMED
    return ANY if settings.when == FASTEST else NO_LESS_EXACT


def with_backend(device: torch.device, settings: Settings) -> Settings:
    """`settings` with "auto or reference" resolved: "reference", with a note, if "auto" serves nothing on `device`."""
    if settings.backend != AUTO_OR_REFERENCE:
        return settings
    automatic = replace(settings, backend=AUTO)
    reason = probe(device, automatic).reason
    if settings.mode == "off" or reason is None:
        return automatic
    note = f"{reason}. The slow reference version runs instead of a kernel: the same result, and no speed-up"
    return replace(settings, backend=REFERENCE, notes=(*settings.notes, note))


def probe(device: torch.device, settings: Settings) -> Decision:
    """How ordinary calls will be served on `device`, or why none can be."""
    if settings.mode == "off":
        return OFF
    routing = Routing(None if settings.backend == AUTO else settings.backend, accelerated_only=True)
    signature = with_mode(CallSignature.minimal(device, settings.options(settings.mode), routing))
    backend = choose(signature)
    if isinstance(backend, Refusal):
        return Decision(reason=backend.reason)
    return Decision(backend.name, backend.settled(signature).options)
