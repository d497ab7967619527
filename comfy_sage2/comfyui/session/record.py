"""What happened during one sampling and how long it took, recorded by any number of threads, and its summary."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from statistics import fmean, median
from typing import NamedTuple

import torch

from ...call.call_site import indexed_name, label
from ...dispatch.plan import MOST_PLANS, CallPlan, Refusal
from ...metrics import Agreement
from ...options import AttentionOptions
from .timer import NO_TIMER, Timer

LayerStep = tuple[int, int]  # layer and step
TIMED_STEPS = 6  # of a sampling, or more


class Sampling(Enum):
    """How far the sampling of a record came."""

    NONE = "none began yet"
    RUNNING = "it runs"
    STOPPED = "an error or an interruption ended it"
    COMPLETE = "it came to its end"


# Why a sampling that began has no pass of the model, by how far it came.
NO_PASS = {
    Sampling.RUNNING: "the sampling is running, and the model has not finished a pass yet",
    Sampling.STOPPED: "the sampling failed or was interrupted before the model finished a pass",
    Sampling.COMPLETE: "the sampling ended, and no pass of the model went through the node",
}


@dataclass(frozen=True)
class Decision:
    """How one attention call is served: by a backend with these options, or by ComfyUI's attention for a reason.

    A backend has a reason too where another attention replaces what the user chose, or a faster one does not.
    is_peer: the backend is another package's attention and replaces what `options` say.
    plan: by which the backend computes the call; None where it was only asked what it could do.
    by: who served a call that no backend did, in words: another node or pack, or what the model's file asks for; None
        is ComfyUI's attention.
    skips: the backend skipped key blocks.
    """

    backend: str | None = None
    options: AttentionOptions | None = None
    reason: str | None = None
    by: str | None = None
    skips: bool = False
    is_peer: bool = False
    plan: CallPlan | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """In words for the user."""
        if self.backend is None:
            return self.reason or ""
        if self.is_peer:
            return f"{self.backend} ({self.reason})"
        served = f"{self.backend} · {label(self.options)}{' · key blocks skipped' if self.skips else ''}"
        return served if self.reason is None else f"{served} ({self.reason})"


@lru_cache(maxsize=MOST_PLANS)
def decision_of(plan: CallPlan | Refusal) -> Decision:
    """How calls of a plan are served; a refused one stays with ComfyUI."""
    if isinstance(plan, Refusal):
        return Decision(reason=plan.reason)
    # Layout and scale differ from call to call: with them the report would list one mode several times.
    options = replace(plan.options, layout="BHND", scale=None)
    return Decision(plan.backend.name, options, plan.reason, is_peer=plan.backend.is_peer, plan=plan)


@dataclass(frozen=True)
class Share:
    """Calls that had the same decision, and the seconds they took together."""

    decision: Decision
    calls: int
    seconds: float


@dataclass(frozen=True)
class SpeedComparison:
    """Calls beside another way to do the same work, such as backends beside ComfyUI's attention.

    Attributes:
        calls: the calls that are compared: the time of the other way is known for their work.
        other_seconds: the time of the other way for them; seconds: their own. Both of one device, on average.
    """

    calls: int
    other_seconds: float
    seconds: float

    @property
    def saved(self) -> float:
        """Seconds; negative when the other way would have been faster."""
        return self.other_seconds - self.seconds

    @property
    def ratio(self) -> float:
        """How many times as fast they were."""
        return self.other_seconds / self.seconds if self.seconds > 0.0 else 1.0


@dataclass(frozen=True)
class Summary:
    """One sampling as plain data.

    Attributes:
        steps: sampling steps.
        layers: attention calls of different names; a call's layer is the number of its name.
        seconds: from the first forward pass to the end of sampling.
        shares: one entry for each distinct decision, the most frequent first, backends before ComfyUI's attention.
        cells: (layer, step) -> the decision of the last such call.
        agreement: (layer, step) -> mean agreement with full precision, where it was measured.
        speed: the backends' calls beside ComfyUI's attention on the same work, or None with nothing to compare.
        devices: GPUs that sampled at the same time. The seconds of `shares` are their sum; `attention_seconds` and
            `speed` are averages per GPU, comparable with `seconds`.
        names: of the layers, by their numbers.
        passes: forward passes of the model.
        fewer_calls: owner of a patch of transformer blocks -> the passes with it that made fewer attention calls than
            the fullest pass of the sampling, and how many calls less.
        silent_passes: those that made no attention call that could be seen.
        sampling: how far it came.
        timed: whether calls were timed; else the seconds of `shares` are 0.
        timed_calls: how many. The others count as the mean of those of equal work and decision.
        calls_without_time: of these others, those like which none was timed; no seconds have them in.
        skip_speeds: layer -> its calls that skipped key blocks beside those that computed all, where there were both.
    """

    steps: int
    layers: int
    seconds: float
    shares: tuple[Share, ...]
    cells: Mapping[LayerStep, Decision]
    agreement: Mapping[LayerStep, Agreement]
    speed: SpeedComparison | None = None
    devices: int = 1
    names: tuple[str, ...] = ()
    passes: int = 0
    silent_passes: int = 0
    fewer_calls: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sampling: Sampling = Sampling.NONE
    timed: bool = True
    timed_calls: int = 0
    calls_without_time: int = 0
    skip_speeds: Mapping[int, SpeedComparison] = field(default_factory=dict)

    def layer_name(self, layer: int) -> str:
        """As `call_site.Layer` has it."""
        return self.names[layer] if layer < len(self.names) else indexed_name(layer)

    @property
    def calls(self) -> int:
        return sum(share.calls for share in self.shares)

    @property
    def was_passed_over(self) -> bool:
        """Whether a node of this pack behind this one served every call: such calls are named and not recorded."""
        return self.calls == 0 and self.silent_passes < self.passes

    @property
    def attention_seconds(self) -> float:
        return sum(share.seconds for share in self.shares) / self.devices


class _Entry(NamedTuple):
    """One attention call; `work` as in `Record.add`."""

    layer: int
    step: int
    decision: Decision
    timer: Timer
    work: Hashable | None


class LayerNumbers(dict[str, int]):
    """The numbers of names: from 0, in the order in which they are first asked for, by any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __missing__(self, name: str) -> int:
        with self._lock:
            return self.setdefault(name, len(self))


@dataclass
class Record:
    """The record of the sampling that runs or ran last; what happens outside of a sampling is not recorded.

    Attributes:
        steps: of the sampling.
        times_calls: a report will read how long the calls took. Those of a sample of the steps are timed
            (`times_step`), as that costs the host as much as all else.
        layer_numbers: of the calls, by their names.
    """

    steps: int = 1
    times_calls: bool = True
    layer_numbers: LayerNumbers = field(default_factory=LayerNumbers, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)
    _timed_every: int = 1  # of so many steps one is timed
    _runs: bool = False  # a sampling does
    _sampling: Sampling = Sampling.NONE
    _entries: list[_Entry] = field(default_factory=list)
    # The first `_counted` entries by their work, and whether ComfyUI's attention served them.
    _calls: Counter[tuple[Hashable, bool]] = field(default_factory=Counter)
    _counted: int = 0
    _comparisons: list[tuple[Hashable, Timer]] = field(default_factory=list)
    _agreement: dict[LayerStep, list[torch.Tensor]] = field(default_factory=dict)
    # Of each pass its attention calls, and whose patch was in the place of blocks.
    _passes: list[tuple[int, str | None]] = field(default_factory=list)
    _whole: Timer | None = None
    _devices: set[Hashable] = field(default_factory=set)

    def begin_sampling(self, steps: int, *, times_calls: bool = True) -> None:
        """Forget everything: a sampling of `steps` steps begins."""
        with self._lock:
            self.steps = steps
            self.times_calls = times_calls
            self._timed_every = max(steps // TIMED_STEPS, 1)
            self._runs = True
            self._sampling = Sampling.RUNNING
            self._entries.clear()
            self._calls.clear()
            self._counted = 0
            self._comparisons.clear()
            self._agreement.clear()
            self.layer_numbers.clear()
            self._passes.clear()
            self._devices.clear()
            self._whole = None

    def begin_pass(self, timer: Timer, device: Hashable = None) -> None:
        """A pass on `device` starts; `timer` measures the whole sampling unless an earlier pass brought one."""
        with self._lock:
            if not self._runs:
                return
            self._devices.add(device)
            if self._whole is None:
                self._whole = timer

    def end_pass(self, calls: int, blocks_by: str | None = None) -> None:
        """A pass with so many attention calls is through. blocks_by: whose patch was in the place of blocks."""
        with self._lock:
            if self._runs:
                self._passes.append((calls, blocks_by))

    def end_sampling(self, *, completed: bool = True) -> None:
        """Stop the measurement of the whole sampling; not `completed`: it failed or was interrupted."""
        with self._lock:
            self._runs = False
            self._sampling = Sampling.COMPLETE if completed else Sampling.STOPPED
            if self._whole is not None:
                self._whole.stop()

    def times_step(self, step: int) -> bool:
        """Whether the calls of `step` are timed: of a long sampling two steps in a row of several, of a short one all.

        Two, as sparse calls choose their blocks in every second step, which takes longer.
        """
        return self.times_calls and step % (2 * self._timed_every) < 2

    def add(self, layer: int, step: int, decision: Decision, timer: Timer, *, work: Hashable | None = None) -> None:
        """Add one attention call whose `timer` is stopped, or NO_TIMER.

        work: equal for calls that are equal work; None for a call whose time cannot be compared.
        """
        if not self._runs:
            return
        self._entries.append(_Entry(layer, step, decision, timer, work))

    def add_agreement(self, layer: int, step: int, agreement: torch.Tensor) -> None:
        """Add the agreement with full precision, as `metrics.compare` gives it, of a call's output."""
        with self._lock:
            if self._runs:
                self._agreement.setdefault((layer, step), []).append(agreement)

    def lacks_comparison(self, work: Hashable) -> bool:
        """Whether backends have served two such calls and ComfyUI's attention none: the moment to time it."""
        with self._lock:
            for entry in self._entries[self._counted :]:
                self._calls[entry.work, entry.decision.backend is None] += 1
                self._counted += 1
            return self._calls[work, False] == 2 and not self._calls[work, True]

    def add_comparison(self, work: Hashable, timer: Timer) -> None:
        """`timer` measured ComfyUI's attention on a call of this work that a backend served."""
        with self._lock:
            if self._runs:
                self._comparisons.append((work, timer))

    def summary(self) -> Summary:
        """The record as plain data; waits for the device."""
        with self._lock:
            entries, comparisons, timed = list(self._entries), list(self._comparisons), self.times_calls
            agreement = {cell: list(measured) for cell, measured in self._agreement.items()}
            whole, devices, steps = self._whole, max(len(self._devices), 1), self.steps
            names, passes, sampling = tuple(self.layer_numbers), tuple(self._passes), self._sampling
        calls = Counter(entry.decision for entry in entries)
        cells = {(entry.layer, entry.step): entry.decision for entry in entries}
        seconds: defaultdict[Decision, float] = defaultdict(float)
        served: list[tuple[Hashable, float]] = []
        comfyui = [(work, timer.seconds()) for work, timer in comparisons]
        by_skip: defaultdict[tuple[int, bool], list[tuple[Hashable, float]]] = defaultdict(list)
        of_each = _elapsed(entries)
        for (layer, _, decision, _, work), elapsed in zip(entries, of_each, strict=True):
            if elapsed is None:
                continue
            seconds[decision] += elapsed
            if work is not None:
                (comfyui if decision.backend is None else served).append((work, elapsed))
                if decision.backend is not None:
                    by_skip[layer, decision.skips].append((work, elapsed))
        shares = [Share(decision, count, seconds[decision]) for decision, count in calls.items()]
        shares.sort(key=lambda share: (share.decision.backend is None, -share.calls))
        return Summary(
            steps=steps,
            layers=1 + max((layer for layer, _ in cells), default=-1),
            seconds=0.0 if whole is None else whole.seconds(),
            shares=tuple(shares),
            cells=cells,
            agreement=_averages(agreement),
            names=names,
            passes=len(passes),
            silent_passes=sum(not count for count, _ in passes),
            fewer_calls=_fewer_calls(passes),
            speed=compared(served, comfyui, devices),
            skip_speeds=_skip_speeds(by_skip, devices),
            devices=devices,
            sampling=sampling,
            timed=timed,
            timed_calls=sum(entry.timer is not NO_TIMER for entry in entries),
            calls_without_time=of_each.count(None),
        )


def _elapsed(entries: Sequence[_Entry]) -> list[float | None]:
    """The seconds of each call: of one that was not timed, the mean of those of equal work and decision; None without.

    Those of its own layer count, if there are any: how many blocks a sparse call computes depends on the layer.
    """
    timed: defaultdict[Hashable, list[float]] = defaultdict(list)
    seconds = [None if entry.timer is NO_TIMER else entry.timer.seconds() for entry in entries]
    for entry, elapsed in zip(entries, seconds, strict=True):
        if elapsed is not None:
            timed[entry.decision, entry.work].append(elapsed)
            timed[entry.decision, entry.work, entry.layer].append(elapsed)
    usual = {key: fmean(values) for key, values in timed.items()}
    for place, entry in enumerate(entries):
        if seconds[place] is None:
            of_all = usual.get((entry.decision, entry.work))
            seconds[place] = usual.get((entry.decision, entry.work, entry.layer), of_all)
    return seconds


def _fewer_calls(passes: Sequence[tuple[int, str | None]]) -> dict[str, tuple[int, int]]:
    """`Summary.fewer_calls`, from the calls and the owner of patched blocks of each pass."""
    most = max((calls for calls, _ in passes), default=0)
    by_owner: dict[str, tuple[int, int]] = {}
    for calls, owner in passes:
        if owner is not None and (calls < most or not calls):
            owners_passes, fewer = by_owner.get(owner, (0, 0))
            by_owner[owner] = owners_passes + 1, fewer + most - calls
    return by_owner


def _averages(measured: Mapping[LayerStep, Sequence[torch.Tensor]]) -> dict[LayerStep, Agreement]:
    """LayerStep -> the average of what was measured there; reads the values of each device at once."""
    by_device: defaultdict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, agreements in enumerate(measured.values()):
        for agreement in agreements:
            by_device[agreement.device].append((number, agreement))
    sums = torch.zeros(len(measured), 3, dtype=torch.float64)
    for entries in by_device.values():
        numbers, values = zip(*entries, strict=True)
        sums.index_add_(0, torch.tensor(numbers), torch.stack(values).to("cpu", torch.float64))
    counts = torch.tensor([len(agreements) for agreements in measured.values()])
    return {cell: Agreement(*row) for cell, row in zip(measured, (sums / counts[:, None]).tolist(), strict=True)}


def compared(
    calls: Iterable[tuple[Hashable, float]], others: Iterable[tuple[Hashable, float]], devices: int = 1
) -> SpeedComparison | None:
    """Compare total times over the work that was measured both ways; None if there is none.

    calls, others: work and seconds of each call, and of each call of the other way. Its time for a work is the median
    of its calls: a first call that loads a kernel counts little.
    """
    times: defaultdict[Hashable, list[float]] = defaultdict(list)
    for work, seconds in others:
        times[work].append(seconds)
    usual = {work: median(measured) for work, measured in times.items()}
    both = [(work, seconds) for work, seconds in calls if work in usual]
    if not both:
        return None
    return SpeedComparison(
        len(both), sum(usual[work] for work, _ in both) / devices, sum(seconds for _, seconds in both) / devices
    )


def _skip_speeds(
    times: Mapping[tuple[int, bool], Sequence[tuple[Hashable, float]]], devices: int
) -> dict[int, SpeedComparison]:
    """`Summary.skip_speeds`, from work and seconds of the calls of (layer, whether they skipped key blocks)."""
    layers = sorted(layer for layer, skips in times if skips)
    speeds = {layer: compared(times[layer, True], times.get((layer, False), ()), devices) for layer in layers}
    return {layer: speed for layer, speed in speeds.items() if speed is not None}
