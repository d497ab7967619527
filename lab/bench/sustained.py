"""Each candidate alone for a while: the speed it keeps up, and what the GPU draws and how fast it clocks meanwhile."""

from __future__ import annotations

import math
import random
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from types import TracebackType

import torch

from .candidates import BenchmarkCandidate, PreparedCandidate
from .shapes import Shape
from .speed import fresh_inputs, prepare

_SETTLE_SECONDS = 0.5
_MEASURED_SECONDS = 1.5
_SAMPLE_MILLISECONDS = 50
# Newer drivers know the power of this moment; that of older ones is a mean over the last second.
_FIELDS = (("power.draw.instant", "clocks.sm"), ("power.draw", "clocks.sm"))


@dataclass(frozen=True)
class Sustained:
    """A candidate alone on a shape for 1.5 seconds: mean milliseconds a call, watts and megahertz.

    part: "call", or "kernel" where quantization lies outside of what can be timed.
    """

    shape: Shape
    candidate: str
    part: str
    milliseconds: float
    watts: float | None
    megahertz: float | None


@dataclass(frozen=True)
class PowerSample:
    """What the driver said at one moment of `time.monotonic`."""

    moment: float
    watts: float
    megahertz: float


class Meter:
    """Context manager around a `nvidia-smi` that samples the current device; nothing is known where it fails."""

    def __init__(self) -> None:
        self._samples: list[PowerSample] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Meter:
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
        device = [] if uuid is None else [f"--id=GPU-{uuid}"]
        for fields in _FIELDS:
            query = ["nvidia-smi", *device, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
            try:
                answer = subprocess.run(query, check=True, capture_output=True, text=True, timeout=20).stdout
            except (OSError, subprocess.SubprocessError):
                continue
            if sample_of(answer.strip(), 0.0) is None:
                continue
            command = [*query, f"--loop-ms={_SAMPLE_MILLISECONDS}"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
            break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sample = sample_of(line, time.monotonic())
            if sample is not None:
                self._samples.append(sample)

    def between(self, begin: float, end: float) -> tuple[float | None, float | None]:
        """Mean watts and megahertz of the samples in this time; None without samples."""
        return means(self._samples, begin, end)


def sample_of(line: str, moment: float) -> PowerSample | None:
    """One line of nvidia-smi's, such as "689.12, 1808"; None for one without two numbers."""
    try:
        watts, megahertz = (float(part) for part in line.split(","))
    except ValueError:  # "[N/A]" for what the driver does not know
        return None
    return PowerSample(moment, watts, megahertz)


def means(samples: Sequence[PowerSample], begin: float, end: float) -> tuple[float | None, float | None]:
    """Mean watts and megahertz of the samples from `begin` to `end`."""
    inside = [sample for sample in list(samples) if begin <= sample.moment <= end]
    if not inside:
        return None, None
    return mean(sample.watts for sample in inside), mean(sample.megahertz for sample in inside)


def measure(
    shape: Shape, candidates: Sequence[BenchmarkCandidate], rng: random.Random, meter: Meter
) -> tuple[list[Sustained], dict[str, str]]:
    """Every candidate alone on `shape`, in an order from `rng`; and candidate -> reason for those that cannot."""
    subjects, failures = prepare(shape, candidates, fresh_inputs(shape))
    parts = {candidate.name: "call" if candidate.has_whole_call else "kernel" for candidate in candidates}
    results = {}
    order = list(subjects)
    rng.shuffle(order)
    for name in order:
        milliseconds, watts, megahertz = _alone(subjects[name], meter)
        results[name] = Sustained(shape, name, parts[name], milliseconds, watts, megahertz)
    return [results[name] for name in subjects], failures


def _alone(subject: PreparedCandidate, meter: Meter) -> tuple[float, float | None, float | None]:
    """Mean milliseconds of a call, watts and megahertz, after the GPU has settled to it."""
    milliseconds = _repeated(subject, _repeats(_SETTLE_SECONDS, _repeated(subject, 1)))
    repeats = _repeats(_MEASURED_SECONDS, milliseconds)
    begin = time.monotonic()
    milliseconds = _repeated(subject, repeats)
    return milliseconds, *meter.between(begin, time.monotonic())


def _repeats(seconds: float, milliseconds: float) -> int:
    return max(math.ceil(seconds * 1e3 / max(milliseconds, 1e-3)), 1)


def _repeated(subject: PreparedCandidate, repeats: int) -> float:
    """Mean milliseconds of calls in a row, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        subject.call.run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / repeats
