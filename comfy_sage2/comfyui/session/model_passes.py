"""The forward pass of the model that this thread runs: its step, and the attention calls that it has made."""

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

    # Sigmas are rounded to float32 on their way; neighboring steps lie much further apart.
    TOLERANCE = 1e-4

    def __init__(self, sigmas: Sequence[float]) -> None:
        self.steps = max(len(sigmas) - 1, 1)
        self._levels = tuple(sigmas)
        self._last = (0, 0, math.nan)  # evaluation, place among the levels, and sigma of the last call

    def step(self, sigma: float, evaluation: int = 0) -> int:
        """The step, 0 to steps - 1, of an evaluation at `sigma`; samplers also evaluate the model between two levels.

        It is the first step that fits `sigma`, searched from the last call's step on, and then from the start.

        evaluation: the number of the sampler's evaluation of the model. Calls of one evaluation belong to one step.
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
    """One forward pass on one GPU, which has its own thread. Its tensors are made before it begins: see `memory`.

    Attributes:
        schedule: of the sampling that the pass belongs to.
        sigma: the noise level, or the readback of it from the device.
        evaluation: the number of the sampler's evaluation of the model that the pass is a part of.
        changes: hooks and options that change the model's computation in this pass.
        check_at_end: the pass can be repeated, so the guard checks once, at its end; else the guard checks each output
            before the model goes on.
        calls: the names of the attention calls so far, such as "block 7 self", or "call 12" in a model without blocks.
        raises_handed_back: the override raises HandedBack, so that the watcher can retry with the call's containers.
        nonfinite: None, or one int32, 0 at first, that calls on its device set when a value is NaN or infinite.
        flag: the copy of `nonfinite` on the host.
        agreements: None, or (calls, 3) float32 for the measured quality of calls on its device.
    """

    session: Session
    schedule: Schedule
    sigma: float | Readback
    transformer_options: dict[str, Any]
    evaluation: int
    device: torch.device
    changes: ModelChanges = frozenset()
    model: int = 0  # the id of the diffusion model: a guider may have two in one sampling
    token_kinds: TokenKinds = ONE_KIND
    has_slices: bool = False
    check_at_end: bool = False
    raises_handed_back: bool = False
    calls: list[str] = field(default_factory=list)
    nonfinite: torch.Tensor | None = None
    agreements: torch.Tensor | None = None
    flag: Readback | None = None
    _step: int = -1  # not known until a call needs it
    _flag_copied_after: int = -1  # number of calls
    _streams: set[int] = field(default_factory=set)  # of the calls that may set the flag
    _rows_used: int = 0
    _counts: dict[str, int] = field(default_factory=dict)
    _kind: str = ""

    @property
    def step(self) -> int:
        """The step of the sampling. The first access may wait for the device.

        That is the first attention call, when the device still has the model's earlier work to do.
        """
        if self._step < 0:  # no cached_property: before Python 3.12 it would make other GPUs' threads wait too
            sigma = self.sigma.values()[0] if isinstance(self.sigma, Readback) else self.sigma
            self._step = self.schedule.step(sigma, self.evaluation)
        return self._step

    def settle(self) -> int:
        """Find the step even if no call needed it: the search for the next pass's step begins there."""
        return self.step

    def next_call(self, block: str | None, is_self: bool) -> str:
        """The name of the call that begins now, made from `block` if the model names its blocks.

        A call has the same name in every pass: models call attention in the same order. Each block has its own count,
        so a pass that skips some blocks keeps the names.
        """
        return self._count(_kind(block, is_self))

    def take_back(self) -> None:
        """Undo the last `next_call`: that call was not made and comes again."""
        self.calls.pop()
        self._counts[self._kind] -= 1

    def count_too(self, other: ModelPass) -> str:
        """Count the call that `other`, the same pass of another node, counted last, and return its name."""
        return self._count(other._kind)

    def _count(self, kind: str) -> str:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        self._kind = kind
        name = _name(kind, number)
        self.calls.append(name)
        return name

    def restart(self) -> None:
        """Count the calls from the first layer on again: the pass is repeated."""
        self.calls.clear()
        self._counts.clear()

    def nonfinite_flag(self, device: torch.device) -> torch.Tensor | None:
        """The flag for a call on `device`, or None if the guard must check its output by itself."""
        if not self.check_at_end or self.nonfinite is None or self.nonfinite.device != device:
            return None
        self._streams.add(_current_stream(device))
        return self.nonfinite

    def copy_flag(self) -> None:
        """Copy the flag after the call that should be the last; if another one follows, `found_nonfinite` copies it.

        What the model enqueues from here on keeps the device busy while the host waits for the flag.
        """
        if not self.check_at_end or self.flag is None or self.nonfinite is None:
            return
        if not can_read_back(self.nonfinite.device):
            return
        if self._streams == {_current_stream(self.nonfinite.device)}:  # other streams may still run calls
            self.flag.start(self.nonfinite)
            self._flag_copied_after = len(self.calls)

    def found_nonfinite(self) -> bool:
        """Whether a call of the finished pass has set the flag; waits for the flag."""
        if self.flag is None or self.nonfinite is None:
            return False
        if self._flag_copied_after != len(self.calls):
            self.flag.start(self.nonfinite)
        return any(self.flag.values())

    def keep(self, agreement: torch.Tensor) -> torch.Tensor:
        """A copy of `agreement`, (3,), that outlives the model's blocks: in `agreements`, else on the CPU."""
        kept = self.agreements
        if kept is None or kept.device != agreement.device or self._rows_used == len(kept):
            return agreement.cpu()
        self._rows_used += 1
        return kept[self._rows_used - 1].copy_(agreement)


# These strings are cached because each call needs them.
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
    """Make every node count calls from the first layer on again: this thread repeats its pass."""
    for model_pass in _running.by_slot.values():
        model_pass.restart()


def current(slot: int) -> ModelPass | None:
    """The forward pass of the node with number `slot` in the chain of nodes, or None outside of one."""
    return _running.by_slot.get(slot)
