"""The shipped rules of mode `auto`: 8 bits where errors do most harm, 4 bits in the middle where that saves time.

The first steps decide what the picture will be and the last ones its detail, the first and last layers stand next to
the model's input and output, and cross-attention is too small to save anything: these keep 8 bits. Everything else
takes 4 bits on a GPU whose tensor cores multiply INT4. On other GPUs 4 bits cost accuracy and save nothing, and all is
8 bits. The rules leave out mode precise: where it is worth its time, a calibration finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..call_site import CallSite, Layer
from ..options import AttentionOptions
from .selector import Choice

# Before anything is measured: the backends whose 4-bit product runs much faster than their 8-bit one. The reference
# stands for such a GPU, so that what `auto` does there can be looked at anywhere. sm80 is left out: with P V in fp16,
# INT4 saves 17 to 20 % there by the data sheets of an A100 and an RTX 3090, too little for what 4 bits cost.
INT4_BACKENDS = ("sm89", "reference")
# Below this many keys the attention is a small part of a layer, and smoothing Q costs more than 4 bits save.
FEW_KEYS = 1024


@dataclass(frozen=True)
class Rule:
    """Shares of the steps and of the layers, at each end, that keep 8 bits, and what that is founded on."""

    steps: float
    layers: float
    evidence: str


GENERAL = Rule(0.15, 0.1, "no measurement of this model is shipped: the general rule; Calibrate measures yours")
# By the class that ComfyUI gives a model.
FAMILIES = {
    "CogVideoX": Rule(
        0.15,
        0.1,
        "SageAttention2's paper measured CogVideoX in 4 bits: cosine 0.994 for the average layer, 0.967 for the worst "
        "(its tables of average and worst accuracy); which layer is the worst one, Calibrate finds",
    ),
}

_PRECISE = "auto: precise nowhere, since 8b is no slower; a policy takes it in the layers that need it"
EIGHT = Choice(AttentionOptions(mode="8b"))
FOUR = Choice(AttentionOptions(mode="4b"), instead=EIGHT.options)


@dataclass(frozen=True)
class RuleSelector:
    """The rules at work on a model of class `family` with `backend`.

    four_bits_pay: whether 4 bits were measured to save enough time on this GPU; None without a measurement.
    """

    family: str
    backend: str
    four_bits_pay: bool | None = None

    @property
    def _mixes(self) -> bool:
        return self.backend in INT4_BACKENDS if self.four_bits_pay is None else self.four_bits_pay

    @property
    def rule(self) -> Rule:
        """The rule of the model's family, or the general one."""
        return FAMILIES.get(self.family, GENERAL)

    def choose(self, site: CallSite) -> Choice:
        """See `ModeSelector.choose`."""
        if not self._mixes or not site.is_self or site.kv_length < FEW_KEYS:
            return EIGHT
        if site.layers is None or _at_an_end(site.step, site.steps, self.rule.steps):
            return EIGHT
        return EIGHT if _at_an_end(site.layer, site.layers, self.rule.layers) else FOUR

    def check_pass(self, calls: Sequence[Layer]) -> None:
        """See `ModeSelector.check_pass`; the rules serve every model."""

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """See `ModeSelector.reasoning`."""
        if not self._mixes:
            little = "no time" if self.four_bits_pay is None else "too little time, as measured on this GPU,"
            return (f"auto: 8b everywhere, since {self.backend} gains {little} from 4 bits", _PRECISE)
        return (
            f"auto: 8b in the first and last {kept(steps, self.rule.steps)} of {steps} steps, in the first and last "
            f"{kept(layers, self.rule.layers)} of {layers} layers, in cross-attention and below {FEW_KEYS} keys; "
            "4b elsewhere",
            f"auto: {self.rule.evidence}",
            _PRECISE,
        )


def kept(count: int, share: float) -> int:
    """How many of `count` are kept at each end: `share` of them, and at least one."""
    return max(1, math.ceil(count * share - 1e-9))


def _at_an_end(index: int, count: int, share: float) -> bool:
    ends = kept(count, share)
    return index < ends or index >= count - ends
