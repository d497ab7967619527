"""What a node does with the attention calls of a sampling: it serves them, or leaves them alone and observes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...call_site import CallSite, Layer
from ..adapter.attention_call import AttentionCall
from .guard import Guard
from .record import Decision, Summary
from .sparsity import BlockSparsity


class Handler(Protocol):
    """One node's part in its session; a handler that subclasses this takes the defaults.

    Attributes:
        title: what the node does, in one line.
        notes: what was decided in place of the user's choice, and why.
        idle_reason: why the node leaves the model as it is, or None when it is at work.
        guard: checks the outputs of backends; None where none is to be checked.
        sparsity: leaves key blocks out; None where all are computed.
        measure_quality: compare the outputs of backends with full precision.
        leaves_to_declared: the calls that are left take the attention that the model's file asks for, if it asks for
            one; else exact attention takes its place, to measure against.
        traced_as: a compiled model is compiled anew when this changes.
    """

    title: str
    notes: tuple[str, ...] = ()
    idle_reason: str | None = None
    guard: Guard | None = None
    sparsity: BlockSparsity | None = None
    measure_quality: bool = False
    leaves_to_declared: bool = True
    traced_as: object = None

    def before_sampling(self, model: Any, noise: torch.Tensor, sigmas: Sequence[float]) -> None:
        """Before a sampling of `model` (ComfyUI's ModelPatcher), from `noise`, over these noise levels."""
        return None

    def begin_sampling(self, steps: int) -> None:
        """A sampling of `steps` steps starts."""

    def complete_sampling(self) -> None:
        """The sampling came to its end without an error; `end_sampling` follows."""
        return None

    def end_sampling(self) -> None:
        """The sampling is over; passes of the model that come now belong to none."""
        return None

    def choose(self, call: AttentionCall, site: CallSite) -> Decision:
        """How the call at `site` is to be served; an observer looks at it here, and leaves it to ComfyUI."""

    def more_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        """How to compute `call` again after `decision`, that of a backend, gave a result that is not finite.

        None leaves it to the attention that was there before.
        """
        return None

    def next_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        """How `call` is served in the next mode more exact than that of `decision`, which came from a backend.

        None leaves it to the attention that was there before.
        """
        return None

    def end_pass(self, calls: Sequence[Layer], first: bool) -> None:
        """A pass with these attention calls is through, the `first` of a sampling or a later one.

        Raises ValueError when the model is not of the kind that the node was set up for.
        """
        return None

    def status(self) -> str:
        """What the node itself shows while it is at work."""
        return self.title

    def policy_text(self) -> str:
        """The policy that the node offers to keep in the workflow, as JSON; "" where it has none."""
        return ""

    def reasoning(self, summary: Summary) -> Sequence[str]:
        """For the report, why the calls were served as they were."""
        return ()

    def own_headline(self, summary: Summary) -> str | None:
        """One line about the sampling in place of the number of calls served, or None."""
        return None

    def own_report(self, summary: Summary) -> str | None:
        """A report in place of the one about the calls served, or None."""
        return None
