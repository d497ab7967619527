"""Which heads of a call site are rotated: the first call of a sampling chooses, and later calls reuse its choice.

A choice inspects a sample of each head in a call. This takes longer than all that rotation costs, and the choice hardly
changes from one step to the next. It stays on the GPU and holds for every call of the layer with the same shapes: both
halves of a guidance pair, in one batch or in separate passes. Every tenth step chooses again. At the end of a pass that
chose, the choices are copied to the host, which does not wait for them. Once they have arrived, a layer in which no
head gains uses the plan without rotation, and any other layer the plan that takes rotated heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from ...call.call_site import CallSite
from ...dispatch.plan import CallPlan, Refusal, rotated_plan
from ...options import AUTO
from ...system.readback import Readback
from ..adapter import memory
from .model_passes import can_read_back
from .record import Decision, decision_of

RENEWED_AFTER = 10  # steps
_MAX_HEADS = 1 << 14  # of all layers, batch entries and shapes of a sampling


class _Board:
    """The rotated heads of all call sites on one device, in one tensor, so that one copy brings them to the host."""

    def __init__(self, device: torch.device) -> None:
        # It outlives the model's blocks, and a pass may write to it outside of ComfyUI's inference mode.
        with memory.unrecorded(), torch.inference_mode(False):
            self.heads = torch.ones(_MAX_HEADS, dtype=torch.int32, device=device)
            self._readback = Readback(_MAX_HEADS, torch.int32, device)
        self._taken = 0
        self._copies = 0  # how many were started
        self._has_choices = False  # since the last copy
        self._answers: list[float] = []
        self._answered = 0  # the number of the copy that holds these answers

    def take(self, shape: torch.Size) -> slice | None:
        """A place for the heads of this shape, or None if the board is full."""
        place = slice(self._taken, self._taken + shape.numel())
        if place.stop > _MAX_HEADS:
            return None
        self._taken = place.stop
        return place

    def note_choice(self) -> int:
        """Note that a call has chosen, and return the number of the copy that will hold its answer."""
        self._has_choices = True
        return self._copies + 1

    def end_pass(self) -> None:
        """Start a copy if a call has chosen since the last one."""
        if self._has_choices:
            self._has_choices = False
            self._copies += 1
            self._readback.start(self.heads)

    def rotates_some(self, place: slice, copy: int) -> bool | None:
        """Whether a head of the place is rotated, by copy number `copy` or a later one; None if none has arrived."""
        if self._answered < copy:
            if self._copies < copy or not self._readback.has_arrived():
                return None
            self._answers, self._answered = self._readback.values(self._taken), self._copies
        return any(self._answers[place])


class _Served:
    """How calls of one plan are served, at any call site: a model has hundreds of sites, and few plans."""

    def __init__(self, chooses: Decision) -> None:
        """chooses: the decision of a call that chooses its heads."""
        self.chooses = chooses

    @cached_property
    def until_known(self) -> Decision:
        return self._planned(some=True)

    @cached_property
    def rotated(self) -> Decision:
        return self._planned(some=True, reconsiders=True)

    @cached_property
    def plain(self) -> Decision:
        return self._planned(some=False)

    def _planned(self, *, some: bool, reconsiders: bool = False) -> Decision:
        plan = self.chooses.plan
        assert plan is not None
        planned = rotated_plan(plan, some=some, reconsiders=reconsiders)
        if isinstance(planned, Refusal):  # ComfyUI's attention was measured to be faster than one with rotation
            return decision_of(planned) if reconsiders else self.chooses
        if planned.backend is not plan.backend:
            return decision_of(planned)
        return replace(self.chooses, plan=planned)  # keeps the user's options, for one line in the report


class _Site:
    """Calls of one plan at one call site."""

    def __init__(self, served: _Served, board: _Board, place: slice, shape: torch.Size) -> None:
        self.heads = board.heads.as_strided(shape, (shape[1], 1), place.start)
        self.chosen_in: int | None = None  # step
        self._served, self._board, self._place = served, board, place
        self._copy = 0
        self._known: Decision | None = None  # how calls are served after the answer has arrived

    def note_choice(self, step: int) -> None:
        self.chosen_in, self._copy, self._known = step, self._board.note_choice(), None

    def decided(self, step: int) -> Decision:
        if self.chosen_in is None or not 0 <= step - self.chosen_in < RENEWED_AFTER:
            return self._served.chooses
        if self._known is None:
            some = self._board.rotates_some(self._place, self._copy)
            if some is None:
                return self._served.until_known
            self._known = self._served.rotated if some else self._served.plain
        return self._known


class Rotations:
    """The rotated heads of one sampling; several threads may call, each for its own device."""

    def __init__(self, *, active: bool = False) -> None:
        """active: a sampling runs; outside of one no choice is kept."""
        self._active = active
        self._boards: dict[torch.device, _Board] = {}
        self._sites: dict[tuple[int, int, CallPlan], _Site | None] = {}
        self._served: dict[CallPlan, _Served] = {}

    def decided(self, decision: Decision, site: CallSite, model: int = 0) -> tuple[Decision, torch.Tensor | None]:
        """What replaces `decision` for a call, and the heads that the call writes or reads."""
        plan = decision.plan
        if plan is None or plan.signature.rotated_heads is None or plan.options.rotate != AUTO or not self._active:
            return decision, None
        if not can_read_back(plan.signature.device):  # a captured graph would keep the addresses
            return decision, None
        key = model, site.layer, plan
        if key not in self._sites:
            self._sites[key] = self._new_site(decision, plan)
        entry = self._sites[key]
        if entry is None:
            return decision, None
        served = entry.decided(site.step)
        takes_heads = served.plan is not None and served.plan.signature.rotated_heads is not None
        return served, entry.heads if takes_heads else None

    def ran(self, decision: Decision, site: CallSite, model: int = 0) -> None:
        """Note that a call was made as `decided` said, with its heads."""
        if decision.plan is None:
            return
        entry = self._sites.get((model, site.layer, decision.plan))
        if entry is not None:  # only plans that choose are keys
            entry.note_choice(site.step)

    def repeat(self, step: int) -> None:
        """Forget what was chosen in `step`: a pass of it is repeated, and its values may be broken."""
        for entry in list(self._sites.values()):
            if entry is not None and entry.chosen_in == step:
                entry.chosen_in = None

    def end_pass(self, device: torch.device) -> None:
        board = self._boards.get(device)
        if board is not None and can_read_back(device):
            board.end_pass()

    def _new_site(self, decision: Decision, plan: CallPlan) -> _Site | None:
        heads, device = plan.signature.rotated_heads, plan.signature.device
        assert heads is not None
        board = self._boards.get(device)
        if board is None:
            board = self._boards[device] = _Board(device)
        place = board.take(heads.shape)
        served = self._served.setdefault(plan, _Served(decision))
        return None if place is None else _Site(served, board, place, heads.shape)
