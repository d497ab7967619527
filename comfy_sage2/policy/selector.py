"""What decides the options of an attention call, and the simplest such selector: the same options everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..call_site import CallSite, Layer
from ..options import AttentionOptions


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


class ModeSelector(Protocol):
    """Decides for every attention call of a sampling."""

    def choose(self, site: CallSite) -> Choice:
        """The options of the call at `site`; the same for the same site."""

    def check_pass(self, calls: Sequence[Layer]) -> None:
        """Raise ValueError when a pass with these attention calls is not of the selector's kind of model."""

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """Why it decides so, in lines for the report, for a model of `layers` and a sampling of `steps`."""


@dataclass(frozen=True)
class FixedSelector:
    """The options that the user chose, everywhere."""

    options: AttentionOptions

    def choose(self, site: CallSite) -> Choice:
        """See `ModeSelector.choose`."""
        return Choice(self.options)

    def check_pass(self, calls: Sequence[Layer]) -> None:
        """See `ModeSelector.check_pass`; it fits every model."""

    def reasoning(self, layers: int, steps: int) -> tuple[str, ...]:
        """See `ModeSelector.reasoning`."""
        return ()
