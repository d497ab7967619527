"""What happened during one sampling, recorded from any number of threads."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from .quality import Quality
from .speed import Comparison, compare
from .stopwatch import Stopwatch

Form = tuple[object, ...]


@dataclass(frozen=True)
class Outcome:
    """How one attention call was served: by a backend, or by the host for a reason."""

    backend: str | None = None
    mode: str = ""
    smooth_v: bool = False
    reason: str | None = None

    @property
    def label(self) -> str:
        """In words for the user."""
        if self.backend is None:
            return self.reason or ""
        return f"{self.backend} · {self.mode}" + (" · smooth V" if self.smooth_v else "")


@dataclass(frozen=True)
class Share:
    """Calls that had the same outcome, and the seconds they took together."""

    outcome: Outcome
    calls: int
    seconds: float


@dataclass(frozen=True)
class Fidelity:
    """Mean agreement with full precision over several calls."""

    cosine: float
    relative_l1: float


@dataclass(frozen=True)
class Summary:
    """One sampling as plain data.

    Attributes:
        steps: sampling steps.
        layers: attention calls of the longest forward pass; a call's index within its forward is its layer.
        seconds: from the first forward pass to the end of sampling.
        shares: one entry for each distinct outcome, the most frequent first, backends before the host.
        cells: (layer, step) -> the outcome of the last such call.
        fidelity: (layer, step) -> agreement with full precision, where it was measured.
        speed: backends' calls beside the host's own of the same form, or None when there is nothing to compare.
        devices: GPUs that sampled at the same time. The seconds of `shares` are their sum; `attention_seconds` and
            `speed`, to be set beside `seconds`, are those of one of them on average.
    """

    steps: int
    layers: int
    seconds: float
    shares: tuple[Share, ...]
    cells: dict[tuple[int, int], Outcome]
    fidelity: dict[tuple[int, int], Fidelity]
    speed: Comparison | None = None
    devices: int = 1

    @property
    def calls(self) -> int:
        return sum(share.calls for share in self.shares)

    @property
    def attention_seconds(self) -> float:
        return sum(share.seconds for share in self.shares) / self.devices


@dataclass
class Statistics:
    """The record of the sampling that runs or ran last."""

    steps: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: Counter[Outcome] = field(default_factory=Counter)
    _times: list[tuple[Outcome, Form | None, Stopwatch]] = field(default_factory=list)
    _forms: Counter[tuple[Form, bool]] = field(default_factory=Counter)  # of (form, by the host)
    _samples: list[tuple[Form, Stopwatch]] = field(default_factory=list)
    _cells: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    _qualities: dict[tuple[int, int], list[Quality]] = field(default_factory=dict)
    _whole: Stopwatch | None = None
    _devices: set[Hashable] = field(default_factory=set)

    def reset(self, steps: int) -> None:
        """Forget everything: a sampling of `steps` steps begins."""
        with self._lock:
            self.steps = steps
            self._calls.clear()
            self._times.clear()
            self._forms.clear()
            self._samples.clear()
            self._cells.clear()
            self._qualities.clear()
            self._devices.clear()
            self._whole = None

    def begin_forward(self, stopwatch: Stopwatch, device: Hashable = None) -> None:
        """A pass on `device` starts; `stopwatch` measures the whole sampling unless an earlier pass brought one."""
        with self._lock:
            self._devices.add(device)
            if self._whole is None:
                self._whole = stopwatch

    def end_sampling(self) -> None:
        """Stop the measurement of the whole sampling."""
        with self._lock:
            if self._whole is not None:
                self._whole.stop()

    def record(
        self,
        layer: int,
        step: int,
        outcome: Outcome,
        stopwatch: Stopwatch,
        quality: Quality | None,
        form: Form | None = None,
    ) -> None:
        """Add one attention call whose `stopwatch` is stopped.

        Calls of equal `form` are equal work; None is a call whose time cannot be compared.
        """
        with self._lock:
            self._calls[outcome] += 1
            self._times.append((outcome, form, stopwatch))
            if form is not None:
                self._forms[form, outcome.backend is None] += 1
            self._cells[layer, step] = outcome
            if quality is not None:
                self._qualities.setdefault((layer, step), []).append(quality)

    def lacks_host_time(self, form: Form) -> bool:
        """Whether a backend has served two calls of this form and the host none: the moment to time the host once."""
        with self._lock:
            return self._forms[form, False] == 2 and not self._forms[form, True]

    def record_host_time(self, form: Form, stopwatch: Stopwatch) -> None:
        """`stopwatch` measured the host on a call of this form that a backend served."""
        with self._lock:
            self._samples.append((form, stopwatch))

    def summary(self) -> Summary:
        """The record as plain data; waits for the device."""
        with self._lock:
            seconds: defaultdict[Outcome, float] = defaultdict(float)
            served: list[tuple[Form, float]] = []
            host = [(form, stopwatch.seconds()) for form, stopwatch in self._samples]
            for outcome, form, stopwatch in self._times:
                elapsed = stopwatch.seconds()
                seconds[outcome] += elapsed
                if form is not None:
                    (host if outcome.backend is None else served).append((form, elapsed))
            shares = [Share(outcome, calls, seconds[outcome]) for outcome, calls in self._calls.items()]
            shares.sort(key=lambda share: (share.outcome.backend is None, -share.calls))
            devices = max(len(self._devices), 1)
            return Summary(
                steps=self.steps,
                layers=1 + max((layer for layer, _ in self._cells), default=-1),
                seconds=0.0 if self._whole is None else self._whole.seconds(),
                shares=tuple(shares),
                cells=dict(self._cells),
                fidelity={place: _mean(qualities) for place, qualities in self._qualities.items()},
                speed=compare(served, host, devices),
                devices=devices,
            )


def _mean(qualities: list[Quality]) -> Fidelity:
    return Fidelity(
        cosine=sum(float(quality.cosine) for quality in qualities) / len(qualities),
        relative_l1=sum(float(quality.relative_l1) for quality in qualities) / len(qualities),
    )
