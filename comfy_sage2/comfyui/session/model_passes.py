"""The forward pass of the model that this thread is in: its step, and which attention calls it has made."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ...call.call_site import indexed_name
from ...sparsity.choices import ModelChanges
from ...system.readback import Readback
from ...system.stream import current_stream
from ..adapter.token_kinds import ONE_KIND, TokenKinds

if TYPE_CHECKING:
    from .session import Session


class Schedule:
    """Noise levels of a sampling, which may repeat or rise again: step i goes from sigmas[i] to sigmas[i + 1]."""

    # A sigma travels through float32 and back; neighboring steps lie much further apart.
    TOLERANCE = 1e-4

    def __init__(self, sigmas: Sequence[float]) -> None:
        self.steps = max(len(sigmas) - 1, 1)
        self._levels = tuple(sigmas)
        self._last = (0, 0, math.nan)  # evaluation, place among the levels, sigma; of the last call

    def step(self, sigma: float, evaluation: int = 0) -> int:
        """The step, 0 to steps - 1, in which the model is asked at `sigma`; samplers also ask between two levels.

        It is the first one from the last call's on that `sigma` fits, else the first of all.

        evaluation: the number of the sampler's evaluation of the model. Calls of one evaluation are of one step.
        """
        last_evaluation, last, last_sigma = self._last  # read once: each GPU has a thread
        if evaluation != last_evaluation and self._is(last_sigma, sigma) and self._reaches(last + 1, sigma):
            last += 1
        count = len(self._levels)
        from_last = chain(range(last, count), range(min(last, count)))
        place = next((place for place in from_last if self._fits(place, sigma)), None)
        if place is None:
            place = min(range(count), key=lambda place: abs(self._levels[place] - sigma))
        self._last = evaluation, place, sigma
        return min(place, self.steps - 1)

    def _fits(self, place: int, sigma: float) -> bool:
        """Whether `sigma` is the level at `place`, or lies between that and the next one."""
        if self._reaches(place, sigma):
            return True
        ends = self._levels[place : place + 2]
        return min(ends) < sigma < max(ends) and not self._reaches(place + 1, sigma)

    def _reaches(self, place: int, sigma: float) -> bool:
        return place < len(self._levels) and self._is(self._levels[place], sigma)

    def _is(self, level: float, sigma: float) -> bool:
        return abs(level - sigma) <= self.TOLERANCE * abs(sigma)


@dataclass
class ModelPass:
    """One forward pass on one GPU (ComfyUI drives each GPU from its own thread). Tensors are made before: see `memory`.

    Attributes:
        schedule: of the sampling that the pass is in.
        sigma: the noise level, or its copy from the device that computes it.
        evaluation: the number of the sampler's evaluation of the model that the pass is a part of.
        changes: hooks and options that make the model another one for this pass.
        check_at_end: the pass can be made again, so the guard looks once at its end; else it looks at each output
            before the model goes on.
        calls: the names of the attention calls so far, such as "block 7 self", or "call 12" of a model without blocks.
        raises_handed_back: the override raises HandedBack, so that the watcher can retry with the call's containers.
        nonfinite: None, or one int32, 0 at first, that calls on its device set when a value is NaN or infinite.
        flag: its copy on the host.
        agreements: None, or (calls, 3) float32 that takes what is measured of the outputs of calls on its device.
    """

    session: Session
    schedule: Schedule
    sigma: float | Readback
    transformer_options: dict[str, Any]
    evaluation: int
    device: torch.device
    changes: ModelChanges = frozenset()
    model: int = 0  # a number of the diffusion model: a guider may have two in one sampling
    token_kinds: TokenKinds = ONE_KIND
    has_slices: bool = False
    check_at_end: bool = False
    raises_handed_back: bool = False
    calls: list[str] = field(default_factory=list)
    nonfinite: torch.Tensor | None = None
    agreements: torch.Tensor | None = None
    flag: Readback | None = None
    _step: int = -1  # until somebody asks
    _flag_copied_after: int = -1  # calls
    _streams: set[int] = field(default_factory=set)  # on which calls may set the flag
    _kept: int = 0
    _named: dict[str, int] = field(default_factory=dict)
    _kind: str = ""

    @property
    def step(self) -> int:
        """Of the sampling. The first question may wait for the device.

        It comes with the first attention call, when the device has the model's work before that to go on with.
        """
        if self._step < 0:  # no cached_property, which before Python 3.12 would let other GPUs' threads wait too
            sigma = self.sigma.values()[0] if isinstance(self.sigma, Readback) else self.sigma
            self._step = self.schedule.step(sigma, self.evaluation)
        return self._step

    def settle(self) -> int:
        """The step, also where no call has asked for it: that of the next pass is looked for from there on."""
        return self.step

    def next_call(self, block: str | None, is_self: bool) -> str:
        """The name of the call that begins now; `block` makes it, if the model says so.

        A name is the same in every pass: models call attention in the same order. Calls of blocks do not count among
        the others, so that a pass in which some blocks are left out keeps the names.
        """
        return self._count(_kind(block, is_self))

    def take_back(self) -> None:
        """The call that `next_call` named last was none: it comes again."""
        self.calls.pop()
        self._named[self._kind] -= 1

    def count_too(self, other: ModelPass) -> str:
        """Count the call that `other`, the same pass of another node, counted last; its name."""
        return self._count(other._kind)

    def _count(self, kind: str) -> str:
        number = self._named.get(kind, 0)
        self._named[kind] = number + 1
        self._kind = kind
        name = _name(kind, number)
        self.calls.append(name)
        return name

    def restart(self) -> None:
        """The pass is made again: its calls are counted from the first layer on."""
        self.calls.clear()
        self._named.clear()

    def nonfinite_flag(self, device: torch.device) -> torch.Tensor | None:
        """The flag for a call on `device`, or None when its output has to be looked at by itself."""
        if not self.check_at_end or self.nonfinite is None or self.nonfinite.device != device:
            return None
        self._streams.add(_current_stream(device))
        return self.nonfinite

    def copy_flag(self) -> None:
        """Copy the flag now, behind what is expected to be the last call; a later call makes `found_nonfinite` do it.

        What the model enqueues from here on keeps the device busy while the host waits for the flag and goes on.
        """
        if not self.check_at_end or self.flag is None or self.nonfinite is None:
            return
        if not can_read_back(self.nonfinite.device):
            return
        if self._streams == {_current_stream(self.nonfinite.device)}:  # others may still be at work
            self.flag.start(self.nonfinite)
            self._flag_copied_after = len(self.calls)

    def found_nonfinite(self) -> bool:
        """Whether a call of the pass, which is through, has set the flag; waits for the flag."""
        if self.flag is None or self.nonfinite is None:
            return False
        if self._flag_copied_after != len(self.calls):
            self.flag.start(self.nonfinite)
        return any(self.flag.values())

    def keep(self, agreement: torch.Tensor) -> torch.Tensor:
        """The values of `agreement`, (3,), that outlive the model's blocks: in `agreements`, else on the CPU."""
        kept = self.agreements
        if kept is None or kept.device != agreement.device or self._kept == len(kept):
            return agreement.cpu()
        self._kept += 1
        return kept[self._kept - 1].copy_(agreement)


# Made once: each call needs them.
@lru_cache(maxsize=4096)
def _kind(block: str | None, is_self: bool) -> str:
    return "" if block is None else f"{block} {'self' if is_self else 'cross'}"


@lru_cache(maxsize=4096)
def _name(kind: str, number: int) -> str:
    return f"{kind} {number + 1}" if kind and number else kind or indexed_name(number)


def can_read_back(device: torch.device) -> bool:
    """False during the capture of a CUDA graph: nothing can be read back, and each replay would write to the flag."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _current_stream(device: torch.device) -> int:
    return current_stream(device) if device.type == "cuda" else 0


class _ThreadPasses(threading.local):
    def __init__(self) -> None:
        self.by_slot: dict[int, ModelPass] = {}


_running = _ThreadPasses()


@contextmanager
def running(slot: int, model_pass: ModelPass) -> Iterator[None]:
    """Within the block `current(slot)` is `model_pass` in this thread."""
    outer = _running.by_slot.get(slot)
    _running.by_slot[slot] = model_pass
    try:
        yield
    finally:
        if outer is None:
            del _running.by_slot[slot]
        else:
            _running.by_slot[slot] = outer


def restart() -> None:
    """The pass that this thread is in is made again: every node counts its calls from the first layer on."""
    for model_pass in _running.by_slot.values():
        model_pass.restart()


def current(slot: int) -> ModelPass | None:
    """The forward pass of the node with number `slot` in the chain of nodes, or None outside of one."""
    return _running.by_slot.get(slot)
