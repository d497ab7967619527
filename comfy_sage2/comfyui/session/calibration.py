"""Measuring, during an ordinary sampling in full precision, what each mode would have done to each layer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ...autotune.cost_model import TunedChoices
from ...call_site import CallSite, Layer, label
from ...metrics import Agreement, worst
from ...options import AttentionOptions
from ...policy.calibrated import BOUNDS, Policy, make_policy, part_of
from ...policy.signature import Signature
from ...policy.targets import TARGETS, VARIANTS
from ...text import error_text
from ..adapter import memory
from ..adapter.attention_call import AttentionCall
from .handler import Handler
from .measurement import Budget, measure_variants
from .record import NO_PASS, Decision, Sampling, Summary

log = logging.getLogger("comfy_sage2")

# With classifier-free guidance the model runs on the positive and the negative prompt, in one batched pass or in two,
# so each (layer, part of the steps) is measured in this many passes.
PASSES = 2
# Seconds of the first measurement on a GPU, where kernels are loaded for it; about 0.1 to 0.2 on an H200.
LOADING = 0.25
CALIBRATING = "calibration: this node quantizes nothing"
NEXT_IS_MEASURED = "The next sampling with this model is measured. SageAttention2 Make Policy shows the result."

Progress = Callable[[int, int], None]  # takes how many pairs of layer and part are measured, and how many there are


class Calibration(Handler):
    """The handler of the *SageAttention2 Calibrate* node: ComfyUI's attention serves every call, and some are measured.

    Attributes:
        signature: of the model.
        head_dims: layer -> head_dim of the calls of the last sampling.
        names: layer -> name of them.
        measurements: (layer, part of the steps) -> the error of each variant.
        left_out: layer -> why it could not be measured.
        budget: the time for measuring in the last sampling.
        rotate: of `AttentionOptions`, to measure with.
        choices: by the times of the GPU.
        sampled_by: whose attention samples, where that is not known to be full precision.
    """

    title = CALIBRATING
    leaves_to_declared = False

    def __init__(
        self,
        signature: Signature,
        cost_limit: float,
        progress: Progress,
        *,
        rotate: str = "off",
        choices: TunedChoices | None = None,
        sampled_by: str | None = None,
        least_seconds: float = 0.0,
    ) -> None:
        """
        Args:
            cost_limit: the share of the sampling's time, 0 to 1, that measuring may take.
            least_seconds: that it may take however short the sampling is.
        """
        self.sampled_by = sampled_by
        self.signature = signature
        self.rotate = rotate
        self.choices = choices
        self._cost_limit = cost_limit
        self._least_seconds = least_seconds
        self._progress = progress
        self._passes: Counter[tuple[int, int]] = Counter()
        self.begin_sampling(1)
        self.end_sampling()

    def begin_sampling(self, steps: int) -> None:
        """See `Handler.begin_sampling`; what an earlier sampling measured is forgotten."""
        self.head_dims: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.measurements: dict[tuple[int, int], dict[AttentionOptions, Agreement]] = {}
        self.left_out: dict[int, str] = {}
        self.budget = Budget(self._cost_limit, self._least_seconds)
        self._passes.clear()
        self._steps = steps
        self._sampling = True

    def end_sampling(self) -> None:
        """See `Handler.end_sampling`."""
        self._sampling = False

    def choose(self, call: AttentionCall, site: CallSite) -> Decision:
        """See `Handler.choose`; measures the modes on a sample of `call` when its turn has come."""
        if self._sampling:
            self.names.setdefault(site.layer, site.name)
            self.head_dims.setdefault(site.layer, call.head_dim)
            key = (site.layer, part_of(site.step, site.steps, BOUNDS))
            if self._is_due(key) and self.budget.allows(LOADING if call.q.device.type == "cuda" else 0.0):
                self._measure(call, key)
        return Decision(reason=f"[SA-309] {CALIBRATING}")

    def end_pass(self, calls: Sequence[Layer], first: bool) -> None:
        """See `Handler.end_pass`."""
        self._progress(len(self.measurements), self.measurable)

    @property
    def measurable(self) -> int:
        """How many pairs of layer and part there are to measure, as far as the passes so far tell."""
        parts = {part_of(step, self._steps, BOUNDS) for step in range(self._steps)}
        return len(parts) * (len(self.head_dims) - len(self.left_out))

    def policy(self, quality: str) -> Policy:
        """The policy for the quality target of this name; ValueError when nothing was measured."""
        return make_policy(
            self.signature,
            quality,
            self.head_dims,
            self.measurements,
            rotate=self.rotate,
            choices=self.choices,
            names=self.names,
        )

    def _is_due(self, key: tuple[int, int]) -> bool:
        """Whether (layer, part) is due: the first time at once, again once its part is measured for all layers."""
        layer, part = key
        if layer in self.left_out or self._passes[key] >= PASSES:
            return False
        # A copy: the thread of another GPU may be adding layers.
        others = (other for other in tuple(self.head_dims) if other not in self.left_out)
        return self._passes[key] == 0 or all(self._passes[other, part] for other in others)

    def _measure(self, call: AttentionCall, key: tuple[int, int]) -> None:
        reason = call.reason_against_quantizing
        if call.q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            reason = "[SA-408] nothing can be measured while a CUDA graph is captured"
        if reason is None:
            _wait_for(call.q.device)
            started = time.perf_counter()
            try:
                with memory.unrecorded():
                    found = measure_variants(call, rotate=self.rotate)
                earlier = self.measurements.get(key, found)
                both = [variant for variant in found if variant in earlier]
                self.measurements[key] = {variant: worst((found[variant], earlier[variant])) for variant in both}
                self._passes[key] += 1
            except (TypeError, ValueError, RuntimeError) as error:  # the sampling itself must go on, memory or not
                reason = f"[SA-408] measuring failed: {error_text(error)}"
                if reason not in tuple(self.left_out.values()):  # one line a reason; the report counts the layers
                    log.warning("SageAttention2: calibration: %s is left out: %s", self.names[key[0]], reason)
            self.budget.add(time.perf_counter() - started)
        if reason is not None:
            self.left_out[key[0]] = reason

    def status(self) -> str:
        """See `Handler.status`."""
        return " ".join((NEXT_IS_MEASURED, *self._not_exact()))

    def _not_exact(self) -> list[str]:
        if self.sampled_by is None:
            return []
        return [
            f"[SA-409] {self.sampled_by} computes the attention of this sampling and may quantize it, so the node does "
            "not measure with the queries, keys and values of full precision. Switch that off while you measure."
        ]

    def own_headline(self, summary: Summary) -> str:
        """See `Handler.own_headline`: how much was measured, at what cost."""
        found = len(self.measurements)
        cost = f", in {self.budget.spent:.2f} s" if found else ""
        if found and summary.seconds > 0.0:
            cost += f" ({min(self.budget.spent / summary.seconds, 1.0):.0%} of the sampling)"
        rotated = "" if self.rotate == "off" else f", rotate {self.rotate}"
        return f"calibration measured {found} of {self.measurable} pairs of layer and part of the steps{rotated}{cost}"

    def own_report(self, summary: Summary) -> str:
        """See `Handler.own_report`: the error of each variant, the shares of each target, what was left out."""
        if not self.head_dims:
            return f"SageAttention2: [SA-404] {_why_nothing(summary)}"
        lines = [f"SageAttention2: {self.own_headline(summary)}.", *self._not_exact()]
        if self.measurements:
            measured = {options for modes in self.measurements.values() for options in modes}
            lines += [self._variant_line(options) for options in VARIANTS if options in measured]
            lines += [f"  quality {name}: {self.policy(name).shares}" for name in TARGETS]
        if len(self.measurements) < self.measurable:
            lines.append(
                "A part that was not measured takes the most exact mode of its layer. To measure more parts, sample "
                "with more steps or raise 'cost limit' (cost_limit)."
            )
        lines += [
            f"{count} layers were left out, and stay in full precision: {reason}"
            for reason, count in Counter(self.left_out.values()).most_common()
        ]
        return "\n".join(lines)

    def _variant_line(self, options: AttentionOptions) -> str:
        found = {site: modes[options] for site, modes in self.measurements.items() if options in modes}
        cosine = sum(measured.cosine for measured in found.values()) / len(found)
        error = sum(measured.relative_l1 for measured in found.values()) / len(found)
        (layer, part), worst = max(found.items(), key=lambda entry: entry[1].relative_l1)
        return (
            f"  {label(options)}: cosine {cosine:.5f}, relative L1 {error:.4f} on average; at worst "
            f"{worst.cosine:.5f}, {worst.relative_l1:.4f} "
            f"({self.names[layer]}, steps {BOUNDS[part]:.0%} to {BOUNDS[part + 1]:.0%})"
        )


def _wait_for(device: torch.device) -> None:
    """Finish earlier work, so that a measurement's time is its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _why_nothing(summary: Summary) -> str:
    """Why no call came that could be measured."""
    others = [share for share in summary.shares if share.decision.by is not None]
    if others:
        return (
            f"nothing was measured: {others[0].decision.by} took {others[0].calls} calls. Put SageAttention2 Calibrate "
            "behind that node, or remove that node."
        )
    if summary.was_passed_over:
        return (
            "nothing was measured: another SageAttention2 node, behind this one, computed every call (SA-316). "
            "Remove that node while you measure."
        )
    if summary.sampling is not Sampling.NONE and not summary.passes:
        return f"nothing was measured: {NO_PASS[summary.sampling]}."
    if summary.passes:
        return f"nothing was measured: the model was run {summary.passes} times and never asked the node (SA-317)."
    return (
        "nothing was sampled for the calibration yet. Connect the sampler's output to 'samples', so that this waits "
        "for it."
    )
