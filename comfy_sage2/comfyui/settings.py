"""The user's choices on *SageAttention2* and *SageAttention2 Options*, and the only declaration of their defaults.

This module does not import torch: the nodes' inputs are made from it even if torch cannot be imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..call.call_site import share_of_steps
from ..options import EXACT, ROTATIONS, AttentionOptions, check_choice
from ..options import MODES as QUANTIZED
from ..text import quoted

AUTO = "auto"
MODES = (AUTO, *QUANTIZED, EXACT, "off")
SPARSE = ("off", "light", "medium", "strong", "draft 20 %", "draft 10 %")
SPARSE_OFF = SPARSE[0]
TARGETS = ("self and cross", "self only")
WHERE_FASTER, ALWAYS, FASTEST = WHEN = ("where it is faster", "always", "whatever is fastest")
_, REFERENCE, AUTO_OR_REFERENCE = BACKENDS = (AUTO, "reference", "auto or reference")

CHOICES: Mapping[str, Collection[str]] = {
    "mode": MODES,
    "sparse": SPARSE,
    "apply_to": TARGETS,
    "when": WHEN,
    "rotate": ROTATIONS,
    "backend": BACKENDS,
}

# Shares of the steps: the name in prompts -> the name that the node shows.
_SHARES = {
    "start_percent": "'start percent' (start_percent)",
    "end_percent": "'end percent' (end_percent)",
    "dense_percent": "'dense at first' (dense_percent)",
}


@dataclass(frozen=True)
class Settings:
    """Options of one *SageAttention2* node; see `CHOICES`, and the nodes' help pages for what each value does.

    Attributes:
        start_percent, end_percent: the share of one sampler's steps, 0 to 1, in which the node is active.
        when: "where it is faster": an exact attention serves the calls for which it was measured to be the fastest,
            also those that the other settings leave in full precision. Another package's attention serves other calls
            if it is faster than the mode and no less exact. "whatever is fastest": also if it is less exact.
        dense_percent: the share of one sampler's steps, 0 to 1, that are dense before `sparse` skips anything.
        backend: "auto" takes an accelerated backend or none; "reference" the slow one in plain PyTorch; "auto or
            reference" the latter only where no accelerated backend can run.
        notes: what replaced the user's choices, and why, for the node, the report and the log.
    """

    mode: str = AUTO
    smooth_v: bool = False
    sparse: str = SPARSE_OFF
    start_percent: float = 0.0
    end_percent: float = 1.0
    apply_to: str = "self and cross"
    when: str = WHERE_FASTER
    rotate: str = "auto"
    guard: bool = True
    dense_percent: float = 0.2
    respect_model_attention: bool = False
    backend: str = AUTO
    notes: tuple[str, ...] = ()

    def with_inputs(self, values: Mapping[str, Any], notes: Iterable[str] = ()) -> Settings:
        """These settings with `values` of a node's inputs and more `notes`; ValueError for shares out of range.

        The default replaces a choice that this version does not have, and a note names it.
        """
        defaults = {field.name: field.default for field in fields(self)}
        accepted, further = dict(values), list(notes)
        for name, value in values.items():
            allowed = CHOICES.get(name)
            if allowed is None or (isinstance(value, str) and value in allowed):  # `in` raises for an array
                continue
            accepted[name] = defaults[name]
            further.append(
                f"[SA-401] {name} {quoted(value)} of this workflow is unknown, so {defaults[name]} is used. Choose one "
                f"of {', '.join(allowed)}"
            )
        return replace(self, **accepted, notes=(*self.notes, *further))

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name, shown in _SHARES.items():
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"[SA-402] {shown} must be from 0 to 1, got {share:g}")
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"[SA-402] {_SHARES['start_percent']} must not be above {_SHARES['end_percent']}, got "
                f"{self.start_percent:g} and {self.end_percent:g}: lower the first or raise the second"
            )

    def options(self, mode: str) -> AttentionOptions:
        if mode == EXACT:
            return AttentionOptions(EXACT)
        # "precise" does not quantize V, so there is nothing to smooth.
        smooth_v = self.smooth_v and mode != "precise"
        return AttentionOptions(mode, smooth_v=smooth_v, rotate=self.rotate, pv_accumulator="auto")

    def reason_for_step(self, step: int, steps: int) -> str | None:
        """Why the node is not active in `step` (from 0) of `steps`, or None when it is."""
        share = share_of_steps(step, steps)
        if share < self.start_percent or (share >= self.end_percent and self.end_percent < 1.0):
            return (
                f"[SA-302] the step is outside 'start percent' {self.start_percent:g} to 'end percent' "
                f"{self.end_percent:g}"
            )
        return None

    def describe(self) -> str:
        """The mode, and what differs from the defaults, in one line."""
        if self.mode == "off":
            return "mode off"
        parts = [f"mode {self.mode}"]
        if (self.start_percent, self.end_percent) != (0.0, 1.0):
            parts.append(f"steps {self.start_percent:.0%} to {self.end_percent:.0%}")
        if self.apply_to != "self and cross":
            parts.append(self.apply_to)
        if self.mode != EXACT:
            if self.smooth_v and self.mode != "precise":
                parts.append("smooth V")
            if self.rotate != "auto":
                parts.append("rotation in all heads" if self.rotate == "on" else "no rotation")
            if self.sparse != SPARSE_OFF:
                parts.append(f"sparse {self.sparse}")
            if self.when != WHERE_FASTER:
                parts.append("always quantized" if self.when == ALWAYS else self.when)
            if not self.guard:
                parts.append("no guard")
        if self.respect_model_attention:
            parts.append("the model's own attention where its file asks for one")
        if self.backend != AUTO:
            parts.append(f"backend {self.backend}")
        return ", ".join(parts)
