"""From measured errors to options: the fastest ones whose error a quality target allows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..autotune.cost_model import TunedChoices
from ..metrics import Agreement
from ..options import AttentionOptions
from ..text import quoted

# The ways to compute a call that a calibration compares, the most cautious last. "precise" does not quantize V: it has
# nothing to smooth there.
VARIANTS = (
    AttentionOptions(mode="4b"),
    AttentionOptions(mode="4b", smooth_v=True),
    AttentionOptions(mode="8b"),
    AttentionOptions(mode="8b", smooth_v=True),
    AttentionOptions(mode="precise"),
)
# On a GPU with INT4 tensor cores. Full precision is slower than all of them.
_FASTEST_FIRST = ("4b", "8b", "precise")


@dataclass(frozen=True)
class Target:
    """The least cosine similarity and the largest relative L1 error that a layer may have."""

    cosine: float
    relative_l1: float

    def allows(self, measured: Agreement) -> bool:
        """Whether a layer with this error is good enough; NaN never is."""
        return measured.cosine >= self.cosine and measured.relative_l1 <= self.relative_l1


# lossless: little more than what rounding P and V to E4M3 costs on any data (relative L1 about 0.038).
# balanced: somewhat below the average layer of CogVideoX in 4 bits (0.9944, 0.068); fast: as bad as its worst layer
# (0.967, 0.196), with which its videos scored as well as full precision's (SageAttention2, tab:quant_data_type1,
# tab:quant_data_type2, tab:effect_smooth_qk).
TARGETS = {
    "lossless": Target(0.999, 0.05),
    "balanced": Target(0.994, 0.08),
    "fast": Target(0.967, 0.2),
}


def check_target(name: object) -> None:
    """Raise ValueError unless `name` is one of TARGETS."""
    if not isinstance(name, str) or name not in TARGETS:
        raise ValueError(f"[SA-401] quality must be one of {', '.join(map(repr, TARGETS))}, got {quoted(name)}")


def fastest_first(modes: Collection[str], choices: TunedChoices | None = None) -> tuple[str, ...]:
    """`modes`, those that a backend serves, in the order of their speed: by the times of a GPU where they decide it."""
    shipped = tuple(sorted(modes, key=_FASTEST_FIRST.index))
    return shipped if choices is None else choices.modes_by_speed(shipped)


def pick(
    measurements: Mapping[AttentionOptions, Agreement], target: Target, choices: TunedChoices | None = None
) -> AttentionOptions | None:
    """The fastest of the measured variants that `target` allows; None, full precision, when it allows none.

    choices: by the times of a GPU.
    """
    for mode in fastest_first({options.mode for options in measurements}, choices):
        for options in VARIANTS:
            if options.mode == mode and options in measurements and target.allows(measurements[options]):
                return options
    return None
