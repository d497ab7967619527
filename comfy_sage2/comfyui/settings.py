"""What the user chose on the *SageAttention2* node."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..call_site import share_of_steps
from ..options import EXACT, ROTATIONS, AttentionOptions, check_choice, rotation_of
from ..options import MODES as QUANTIZED
from ..policy.calibrated import COMPUTE_ALL, SKIP, SPARSE, Policy
from ..sparsity.levels import LEVELS, SKIP_LEVELS, Level
from ..text import quoted

MODES = (*QUANTIZED, "auto", EXACT, "off")
TARGETS = ("self and cross", "self only")
AUTO, REFERENCE, AUTO_OR_REFERENCE = BACKENDS = ("auto", "reference", "auto or reference")
UNGUARDED, VALUES, FIDELITY = GUARDS = ("off", "values", "values and fidelity")
WHERE_FASTER, ALWAYS, FASTEST = WHEN = ("where it is faster", "always", "whatever is fastest")

# Inputs as the node shows them, and as prompts name them.
_FROM, _UNTIL = "'active from' (start_percent)", "'active until' (end_percent)"
_DENSE_AT_FIRST = "'dense at first' (dense_percent)"

_CHOICES = {
    "mode": MODES,
    "apply_to": TARGETS,
    "backend": BACKENDS,
    "when": WHEN,
    "guard": GUARDS,
    "sparse": SPARSE,
    "skip": SKIP,
    "rotate": ROTATIONS,
}


def reason_against_steps(start_percent: float, end_percent: float) -> str | None:
    """Why the node cannot be active from one share of the steps to the other, or None when it can."""
    reason = _reason_against_share(_FROM, start_percent) or _reason_against_share(_UNTIL, end_percent)
    if reason is not None or start_percent <= end_percent:
        return reason
    return (
        f"[SA-402] {_FROM} must not be above {_UNTIL}, got {start_percent:g} and {end_percent:g}: lower the first or "
        "raise the second"
    )


def _reason_against_share(name: str, value: float) -> str | None:
    """Why `value` of the input, `name` for the user, is no share of the steps, or None when it is."""
    if 0.0 <= value <= 1.0:
        return None
    where = "above 1" if value > 1.0 else "below 0" if value < 0.0 else "not a number"
    return f"[SA-402] {name} must be from 0 to 1, and {value:g} is {where}"


@dataclass(frozen=True)
class SparsityChoice:
    """What may be left out of self-attention, and when.

    Attributes:
        title: the input and its level, for the user.
        level: what a head may lose.
        dense_share: of the sampling steps, the first ones that compute all key blocks, 0 to 1.
    """

    title: str
    level: Level
    dense_share: float

    def is_dense(self, step: int, steps: int) -> bool:
        """Whether `step` (from 0) of `steps` is one of the first ones."""
        return share_of_steps(step, steps) < self.dense_share


@dataclass(frozen=True)
class Settings:
    """Options of one *SageAttention2* node.

    Attributes:
        mode: of `AttentionOptions`; "auto" mixes "8b" and "4b" by the shipped rules; "off" leaves the model as it is.
        smooth_v: subtract V's channel means before it is quantized, which "precise" and "exact" do not.
        start_percent, end_percent: the share of one sampler's steps, 0 to 1, in which the node is active.
        apply_to: "self and cross", or "self only" to leave out calls whose queries and keys differ in number.
        backend: "auto" takes an accelerated backend or none; "reference" the slow one in plain PyTorch; "auto or
            reference" the latter only where no accelerated backend can run.
        measure_quality: compare a sample of every call with full precision.
        guard: check the outputs, and compute layers that fail more exactly: "values" for NaN and infinity; "values and
            fidelity" also compares a sample of each pass with exact attention; "off" checks nothing.
        policy: decides the options of each call in place of `mode` and `smooth_v`; "off" stays off.
        rotate: of `AttentionOptions`, in every mode and whatever a policy decides; True and False of older prompts are
            "on" and "off".
        when: "always", or "where it is faster": then calls for which an exact attention was measured to be the fastest
            are served by it, also those that the other settings leave in full precision, and the others by another
            package's attention that is faster than the mode and no less exact. "whatever is fastest": also by one that
            is less exact.
        respect_model_attention: calls for which the model's file asks for an attention are left to that.
        sparse: how much may be lost by key blocks that are left out: of `sparsity.levels.LEVELS`; "off" for what `skip`
            says, or else the policy.
        dense_percent: the share of one sampler's steps, 0 to 1, that are dense before `sparse` leaves anything out.
        skip: of `sparsity.levels.SKIP_LEVELS`, as earlier versions had it; counts where `sparse` is "off".
        notes: what was decided in place of the user's choice, and why, for the node, the report and the log.
    """

    mode: str = "8b"
    smooth_v: bool = False
    start_percent: float = 0.0
    end_percent: float = 1.0
    apply_to: str = "self and cross"
    backend: str = "auto"
    measure_quality: bool = False
    guard: str = UNGUARDED
    policy: Policy | None = None
    rotate: str = "off"
    when: str = ALWAYS
    respect_model_attention: bool = False
    sparse: str = COMPUTE_ALL
    dense_percent: float = 0.2
    skip: str = COMPUTE_ALL
    notes: tuple[str, ...] = ()

    @classmethod
    def of_workflow(cls, **values: Any) -> Settings:
        """Settings of these values; for an unknown mode, backend or rotation the default, and a note that names it.

        A workflow may have been saved by another version of the pack. In those of earlier ones `guard` is true or
        false, and `guard_level` says what it checks. Raises ValueError for other values.
        """
        level = values.pop("guard_level", VALUES)
        guard = values.get("guard")
        if isinstance(guard, int) and guard in (0, 1):
            values["guard"] = level if guard else UNGUARDED
        notes = []
        defaults = {field.name: field.default for field in fields(cls)}
        values["rotate"] = rotation_of(values.get("rotate", defaults["rotate"]))
        for name in ("mode", "backend", "rotate"):
            allowed, value = _CHOICES[name], values.get(name, defaults[name])
            if not isinstance(value, str) or value not in allowed:  # an array answers `in` by an error
                values[name] = defaults[name]
                notes.append(
                    f"[SA-401] {name} {quoted(value)} of this workflow is unknown, so {defaults[name]} is used. Choose "
                    f"one of {', '.join(allowed)}"
                )
        return cls(**values, notes=tuple(notes))

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotate", rotation_of(self.rotate))
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        reason = reason_against_steps(self.start_percent, self.end_percent) or _reason_against_share(
            _DENSE_AT_FIRST, self.dense_percent
        )
        if reason is not None:
            raise ValueError(reason)

    @property
    def options(self) -> AttentionOptions:
        """The options by which to ask whether a backend works here; auto and policies can do with 8 bits alone."""
        if self.policy is None and self.mode == EXACT:
            return AttentionOptions(EXACT)
        if self.policy is not None or self.mode not in QUANTIZED:
            return AttentionOptions(rotate=self.rotate)
        return AttentionOptions(mode=self.mode, smooth_v=self.smooth_v, rotate=self.rotate)

    @property
    def sparsity(self) -> SparsityChoice | None:
        """What may be left out, by the node's own inputs before the policy; None is nothing."""
        chosen = [(self.sparse, self.skip)]
        if self.policy is not None:
            chosen.append((self.policy.sparse, self.policy.skip))
        for sparse, skip in chosen:
            if sparse != COMPUTE_ALL:
                return SparsityChoice(f"sparse {sparse}", LEVELS[sparse], self.dense_percent)
            if skip != COMPUTE_ALL:
                return SparsityChoice(f"skip {skip}", SKIP_LEVELS[skip], 0.0)
        return None

    def reason_for_step(self, step: int, steps: int) -> str | None:
        """Why the node is not active in `step` (from 0) of `steps`, or None when it is."""
        share = share_of_steps(step, steps)
        if share < self.start_percent or (share >= self.end_percent and self.end_percent < 1.0):
            return (
                f"[SA-302] the step is outside 'active from' {self.start_percent:g} to 'active until' "
                f"{self.end_percent:g}"
            )
        return None

    def describe(self) -> str:
        """The options in one line."""
        if self.mode == "off":
            return "mode off"
        parts = [f"mode {self.mode}" if self.policy is None else f"policy ({self.policy.target})"]
        if self.options.smooth_v and self.mode != "precise":
            parts.append("smooth V")
        if self.options.mode != EXACT and self.rotate != "off":
            parts.append("rotation" if self.rotate == "on" else "rotation by the head")
        if (self.start_percent, self.end_percent) != (0.0, 1.0):
            parts.append(f"steps {self.start_percent:.0%} to {self.end_percent:.0%}")
        if self.apply_to != "self and cross":
            parts.append(self.apply_to)
        if self.sparsity is not None and self.options.mode != EXACT:
            parts.append(self.sparsity.title)
        if self.when != ALWAYS and self.options.mode != EXACT:
            parts.append(self.when)
        if self.guard != UNGUARDED:
            parts.append(f"guard ({self.guard})")
        if self.respect_model_attention:
            parts.append("the model's own attention where its file asks for one")
        if self.backend != AUTO:
            parts.append(f"backend {self.backend}")
        return ", ".join(parts)
