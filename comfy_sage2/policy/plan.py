"""What decides the options of an attention call, and the simplest such plan: the same options everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..options import AttentionOptions

_CALL = "call "


def by_number(number: int) -> str:
    """The name of a call of which the model does not say in which block it is."""
    return f"{_CALL}{number}"


def is_by_number(name: str) -> bool:
    """Whether `by_number` made this name."""
    return name.startswith(_CALL)


@dataclass(frozen=True)
class Layer:
    """One attention call of a pass: "block 7 self", or, where the model names no blocks, its number as "call 12"."""

    name: str
    head_dim: int


@dataclass(frozen=True)
class Place:
    """Where in a sampling an attention call stands.

    Attributes:
        layer: the number of the call's name, from 0, in the order in which the names of a sampling first came.
        layers: calls of one pass; None during the first pass, when the number is not known yet.
        step, steps: sampling step from 0, and the number of steps.
        kv_length: tokens of k and v.
        name: as in `Layer`.
        is_self: whether q and k come from the same tokens.
    """

    layer: int
    layers: int | None
    step: int
    steps: int
    kv_length: int
    name: str = ""
    is_self: bool = True


@dataclass(frozen=True)
class Choice:
    """How a call is to be computed.

    Attributes:
        options: of the quantized attention; None leaves the call in full precision.
        reason: for the report, why the call stays in full precision.
        instead: the options to take where no backend can run `options`; None leaves such a call in full precision.
    """

    options: AttentionOptions | None
    reason: str = ""
    instead: AttentionOptions | None = None


class Plan(Protocol):
    """Decides for every attention call of a sampling."""

    def choose(self, place: Place) -> Choice:
        """The options of the call at `place`; the same for the same place."""

    def check_pass(self, calls: Sequence[Layer]) -> None:
        """Raise ValueError when a pass with these attention calls is not of the plan's kind of model."""

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """Why it decides so, in lines for the report, for a model of `layers` and a sampling of `steps`."""


@dataclass(frozen=True)
class FixedPlan:
    """The options that the user chose, everywhere."""

    options: AttentionOptions

    def choose(self, place: Place) -> Choice:
        """See `Plan.choose`."""
        return Choice(self.options)

    def check_pass(self, calls: Sequence[Layer]) -> None:
        """See `Plan.check_pass`; it fits every model."""

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """See `Plan.reasoning`."""
        return ()


def label(options: AttentionOptions | None) -> str:
    """The options in a few words for the user, such as "4b · smooth V"; None is full precision."""
    if options is None:
        return "full"
    parts = [options.mode]
    if options.smooth_v:
        parts.append("smooth V")
    if options.rotate:
        parts.append("rotation")
    if options.pv_accumulator == "fp16":
        parts.append("FP16 accumulators")
    return " · ".join(parts)
