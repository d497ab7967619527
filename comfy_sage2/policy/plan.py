"""What decides the mode of an attention call, and the simplest such thing: the same mode everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

FULL = "full"  # full precision: the call is left to the host
QUANTISED = ("8b", "4b")


@dataclass(frozen=True)
class Place:
    """Where in a sampling an attention call stands.

    Attributes:
        layer: the call's index within one pass of the model, from 0.
        layers: calls of one pass; None while the first pass runs and nobody knows.
        step, steps: sampling step from 0, and how many there are.
        q_length, kv_length: tokens.
    """

    layer: int
    layers: int | None
    step: int
    steps: int
    q_length: int
    kv_length: int


@dataclass(frozen=True)
class Choice:
    """How a call is to be computed.

    Attributes:
        mode: "8b", "4b" or FULL.
        smooth_v: subtract V's channel means before it is quantised.
        reason: for the report, why the mode is FULL.
        instead: the mode to take where no backend can run `mode`; None leaves such a call to the host.
    """

    mode: str
    smooth_v: bool = False
    reason: str = ""
    instead: str | None = None


class Plan(Protocol):
    """Decides for every attention call of a sampling."""

    def choose(self, place: Place) -> Choice:
        """The mode of the call at `place`; the same for the same place."""

    def check_pass(self, head_dims: Sequence[int]) -> None:
        """Raise ValueError when a pass with attention calls of these head_dims is not of the plan's kind of model."""

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """Why it decides so, in lines for the report, for a model of `layers` and a sampling of `steps`."""


@dataclass(frozen=True)
class FixedPlan:
    """The mode that the user chose, everywhere."""

    choice: Choice

    def choose(self, place: Place) -> Choice:
        """See `Plan.choose`."""
        return self.choice

    def check_pass(self, head_dims: Sequence[int]) -> None:
        """See `Plan.check_pass`; it serves every model."""

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """See `Plan.reasoning`."""
        return ()
