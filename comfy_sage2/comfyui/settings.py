"""What the user chose on the *SageAttention2* node."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import EXACT, AttentionOptions, check_choice
from ..options import MODES as QUANTIZED
from ..policy.calibrated import Policy

MODES = (*QUANTIZED, "auto", EXACT, "off")
TARGETS = ("self and cross", "self only")
BACKENDS = ("auto", "reference")
WHERE_FASTER, ALWAYS = WHEN = ("where it is faster", "always")


@dataclass(frozen=True)
class Settings:
    """Options of one *SageAttention2* node.

    Attributes:
        mode: of `AttentionOptions`; "auto" mixes "8b" and "4b" by the shipped rules; "off" leaves the model as it is.
        smooth_v: subtract V's channel means before it is quantized, which "precise" and "exact" do not.
        start_percent, end_percent: the share of the sampling steps, 0 to 1, in which the node is active.
        apply_to: "self and cross", or "self only" to leave out calls whose queries and keys differ in number.
        backend: "auto" takes an accelerated backend or none; "reference" the slow one in plain PyTorch.
        measure_quality: compare a sample of every call with full precision.
        guard: check the outputs for NaN and infinity, and compute such calls again in full precision.
        policy: decides the options of each call in place of `mode` and `smooth_v`; "off" stays off.
        rotate: rotate Q and K after smoothing, in every mode and whatever a policy decides.
        when: "always", or "where it is faster": then calls for which an exact attention was measured to be the fastest
            are served by it, also those that the other settings leave in full precision.
    """

    mode: str = "8b"
    smooth_v: bool = False
    start_percent: float = 0.0
    end_percent: float = 1.0
    apply_to: str = "self and cross"
    backend: str = "auto"
    measure_quality: bool = False
    guard: bool = False
    policy: Policy | None = None
    rotate: bool = False
    when: str = ALWAYS

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("apply_to", TARGETS), ("backend", BACKENDS), ("when", WHEN)):
            check_choice(name, getattr(self, name), allowed)
        if not 0.0 <= self.start_percent <= self.end_percent <= 1.0:
            raise ValueError(
                "[SA-402] start_percent and end_percent must satisfy 0 <= start <= end <= 1, "
                f"got {self.start_percent} and {self.end_percent}"
            )

    @property
    def options(self) -> AttentionOptions:
        """The options by which to ask whether a backend works here; auto and policies can do with 8 bits alone."""
        if self.policy is None and self.mode == EXACT:
            return AttentionOptions(EXACT)
        if self.policy is not None or self.mode not in QUANTIZED:
            return AttentionOptions(rotate=self.rotate)
        return AttentionOptions(mode=self.mode, smooth_v=self.smooth_v, rotate=self.rotate)

    def reason_for_step(self, step: int, steps: int) -> str | None:
        """Why the node is not active in `step` (from 0) of `steps`, or None when it is."""
        share = (step + 1e-6) / steps  # a share that was computed, as 0.1 + 0.2, may lie just beside its step
        if share < self.start_percent or (share >= self.end_percent and self.end_percent < 1.0):
            return (
                f"[SA-302] the step is outside start_percent {self.start_percent:g} to end_percent {self.end_percent:g}"
            )
        return None

    def describe(self) -> str:
        """The options in one line."""
        if self.mode == "off":
            return "mode off"
        parts = [f"mode {self.mode}" if self.policy is None else f"policy ({self.policy.target})"]
        if self.options.smooth_v and self.mode != "precise":
            parts.append("smooth V")
        if self.options.rotate:
            parts.append("rotation")
        if (self.start_percent, self.end_percent) != (0.0, 1.0):
            parts.append(f"steps {self.start_percent:.0%} to {self.end_percent:.0%}")
        if self.apply_to != "self and cross":
            parts.append(self.apply_to)
        if self.when == WHERE_FASTER and self.options.mode != EXACT:
            parts.append(self.when)
        if self.guard:
            parts.append("guarded")
        if self.backend != "auto":
            parts.append(f"backend {self.backend}")
        return ", ".join(parts)
