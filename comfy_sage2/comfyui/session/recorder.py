"""Recording one sampling, from any number of threads: its calls, how long they took, and how close they were."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean, median_low
from typing import NamedTuple

import torch

from ...dispatch.plan import CallPlan
from ...metrics import Agreement
from .record import Decision, LayerStep, Sampling, Share, SpeedComparison, Summary
from .timer import NO_TIMER, Timer

TIMED_STEPS = 6  # of a sampling, at least
Times = list[tuple[Hashable, float]]  # work and seconds of calls


class _Entry(NamedTuple):
    """One attention call; `work` as in `Recorder.add`."""

    layer: int
    step: int
    decision: Decision
    timer: Timer
    work: Hashable | None


class Recorder:
    """Records the current or last sampling. times_calls: calls in a sample of the steps are timed, for a report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset(1, times_calls=True)

    def _reset(self, steps: int, *, times_calls: bool) -> None:
        self.times_calls = times_calls
        self._steps = steps
        self._timed_every = max(steps // TIMED_STEPS, 1)  # one of so many steps is timed
        self._is_running = False
        self._sampling = Sampling.NONE
        self._layers: dict[str, int] = {}
        self._entries: list[_Entry] = []
        self._calls: Counter[Hashable] = Counter()  # work -> calls that a backend was to serve
        self._comparisons: list[tuple[Hashable, Timer]] = []
        self._agreement: dict[LayerStep, list[torch.Tensor]] = {}
        # Of each pass, the number of attention calls, and whose patch replaced blocks.
        self._passes: list[tuple[int, str | None]] = []
        self._whole: Timer | None = None
        self._devices: set[Hashable] = set()
        self._final: Summary | None = None

    def begin_sampling(self, steps: int, *, times_calls: bool = True) -> None:
        """Forget the last sampling and begin one of `steps` steps."""
        with self._lock:
            self._reset(steps, times_calls=times_calls)
            self._is_running, self._sampling = True, Sampling.RUNNING

    def begin_pass(self, timer: Timer, device: Hashable = None) -> None:
        """Begin a pass on `device`. `timer` measures the whole sampling, unless an earlier pass brought one."""
        with self._lock:
            if self._is_running:
                self._devices.add(device)
                self._whole = self._whole or timer

    def end_pass(self, calls: int, blocks_by: str | None = None) -> None:
        """End a pass that made `calls` attention calls. blocks_by: whose patch replaced blocks."""
        with self._lock:
            if self._is_running:
                self._passes.append((calls, blocks_by))

    def end_sampling(self, *, completed: bool = True) -> None:
        """Stop timing the whole sampling. completed: False if it failed or was interrupted."""
        with self._lock:
            self._is_running, self._final = False, None
            self._sampling = Sampling.COMPLETE if completed else Sampling.STOPPED
            if self._whole is not None:
                self._whole.stop()

    def layer_of(self, name: str) -> int:
        """The number of a call's name, from 0, in the order in which the sampling's names first appeared."""
        number = self._layers.get(name)  # the usual case: each call asks
        if number is None:
            with self._lock:
                number = self._layers.setdefault(name, len(self._layers))
        return number

    def times_step(self, step: int) -> bool:
        """Whether calls of `step` are timed: two steps in a row, as sparse calls choose blocks in every second one."""
        return self.times_calls and step % (2 * self._timed_every) < 2

    def add(self, layer: int, step: int, decision: Decision, timer: Timer, *, work: Hashable | None = None) -> None:
        """Add a call. timer: stopped, or NO_TIMER. work: equal for calls with comparable times, or None."""
        if self._is_running:
            self._entries.append(_Entry(layer, step, decision, timer, work))

    def add_agreement(self, layer: int, step: int, agreement: torch.Tensor) -> None:
        with self._lock:
            if self._is_running:
                self._agreement.setdefault((layer, step), []).append(agreement)

    def wants_comparison(self, work: Hashable) -> bool:
        """Count a backend's call of `work`; True for the second and third, because the first one also loads kernels."""
        if not self._is_running:
            return False
        self._calls[work] += 1
        return self._calls[work] in (2, 3)

    def add_comparison(self, work: Hashable, timer: Timer) -> None:
        """`timer` measured ComfyUI's attention on a call of this work that a backend serves."""
        with self._lock:
            if self._is_running:
                self._comparisons.append((work, timer))

    def summary(self) -> Summary:
        """The record as plain data; waits for the device. For a finished sampling it is made once."""
        with self._lock:
            if self._final is not None:
                return self._final
            recorded, is_final = self._entries, not self._is_running
            entries, comparisons, passes = list(recorded), list(self._comparisons), tuple(self._passes)
            agreement = {cell: list(measured) for cell, measured in self._agreement.items()}
            whole, devices, names = self._whole, max(len(self._devices), 1), tuple(self._layers)
            steps, sampling, timed = self._steps, self._sampling, self.times_calls
        kinds, decisions = _numbered([entry.decision for entry in entries])
        seconds = [0.0] * len(decisions)
        served: Times = []
        comfyui: Times = [(work, timer.seconds()) for work, timer in comparisons]
        elapsed_times = _elapsed(entries, kinds)
        for entry, kind, elapsed in zip(entries, kinds, elapsed_times, strict=True):
            if elapsed is None:
                continue
            seconds[kind] += elapsed
            if entry.work is not None:
                (comfyui if entry.decision.backend is None else served).append((entry.work, elapsed))
        shares = [Share(decisions[kind], calls, seconds[kind]) for kind, calls in Counter(kinds).items()]
        shares.sort(key=lambda share: (share.decision.backend is None, -share.calls))
        summary = Summary(
            steps=steps,
            layers=1 + max((entry.layer for entry in entries), default=-1),
            seconds=0.0 if whole is None else whole.seconds(),
            shares=tuple(shares),
            cells={(entry.layer, entry.step): entry.decision for entry in entries},
            agreement={cell: _mean(measured) for cell, measured in agreement.items()},
            names=names,
            passes=len(passes),
            silent_passes=sum(not count for count, _ in passes),
            fewer_calls=_fewer_calls(passes),
            speed=_compared(served, comfyui, devices),
            devices=devices,
            sampling=sampling,
            timed=timed,
            timed_calls=sum(entry.timer is not NO_TIMER for entry in entries),
            calls_without_time=elapsed_times.count(None),
            peak=_peak({(entry.decision.plan, entry.decision.peak_bytes) for entry in entries}),
        )
        with self._lock:
            if is_final and self._entries is recorded:  # another sampling may have begun meanwhile
                self._final = summary
        return summary


def _numbered(decisions: Sequence[Decision]) -> tuple[list[int], list[Decision]]:
    """The number of each decision, equal for equal decisions, and the decision of each number.

    Identity comes first: most decisions are the same few objects, and comparing two takes as long as recording a call.
    """
    numbers: dict[Decision, int] = {}
    objects = {id(decision): decision for decision in decisions}
    number_of = {key: numbers.setdefault(decision, len(numbers)) for key, decision in objects.items()}
    return [number_of[id(decision)] for decision in decisions], list(numbers)


def _elapsed(entries: Sequence[_Entry], kinds: Sequence[int]) -> list[float | None]:
    """The seconds of each call. A call that was not timed gets the mean of timed ones of equal work and kind, or None.

    It takes those of its own layer if there are any: how many blocks a sparse call computes depends on the layer.
    """
    seconds = [None if entry.timer is NO_TIMER else entry.timer.seconds() for entry in entries]
    if seconds.count(None) == len(seconds):
        return seconds
    timed: defaultdict[Hashable, list[float]] = defaultdict(list)
    first: dict[Hashable, float] = {}  # the first call also loads or compiles; it counts if no other was timed
    for entry, kind, elapsed in zip(entries, kinds, seconds, strict=True):
        if elapsed is None:
            continue
        if (kind, entry.work) not in first:
            first[kind, entry.work] = elapsed
            continue
        timed[kind, entry.work].append(elapsed)
        timed[kind, entry.work, entry.layer].append(elapsed)
    usual = first | {key: fmean(values) for key, values in timed.items()}
    for place, (entry, kind) in enumerate(zip(entries, kinds, strict=True)):
        if seconds[place] is None:
            of_all_layers = usual.get((kind, entry.work))
            seconds[place] = usual.get((kind, entry.work, entry.layer), of_all_layers)
    return seconds


def _peak(calls: Iterable[tuple[CallPlan | None, int | None]]) -> tuple[int, int] | None:
    """`Summary.peak`, from the plans of the calls, and the peaks of calls that `run` did not compute."""
    plans = [(plan, plan.peak_bytes() if peak is None else peak) for plan, peak in calls if plan is not None]
    return max(((peak, plan.plain_bytes) for plan, peak in plans if peak is not None), default=None)


def _fewer_calls(passes: Sequence[tuple[int, str | None]]) -> dict[str, tuple[int, int]]:
    """`Summary.fewer_calls`, from the calls and the owner of patched blocks of each pass."""
    most = max((calls for calls, _ in passes), default=0)
    by_owner: dict[str, tuple[int, int]] = {}
    for calls, owner in passes:
        if owner is not None and (calls < most or not calls):
            owners_passes, fewer = by_owner.get(owner, (0, 0))
            by_owner[owner] = owners_passes + 1, fewer + most - calls
    return by_owner


def _mean(measured: Iterable[torch.Tensor]) -> Agreement:
    return Agreement(*torch.stack([values.to("cpu", torch.float64) for values in measured]).mean(dim=0).tolist())


def _compared(times: Times, times_otherwise: Times, devices: int) -> SpeedComparison | None:
    """Compare total times over the work that was measured both ways; None if there is none.

    The other way's time is the lower median of its calls of a work, so a first call that loads a kernel does not count.
    """
    by_work: defaultdict[Hashable, list[float]] = defaultdict(list)
    for work, seconds in times_otherwise:
        by_work[work].append(seconds)
    usual = {work: median_low(measured) for work, measured in by_work.items()}
    both = [(seconds, usual[work]) for work, seconds in times if work in usual]
    if not both:
        return None
    mine, otherwise = map(sum, zip(*both, strict=True))
    return SpeedComparison(len(both), otherwise / devices, mine / devices)
