"""How long the attention kernels of a call take, without the passes before them: from the profiler's kernel records.

Our call is one call into C++ that enqueues statistics, quantization and attention, so CUDA events cannot divide it. The
profiler records the start and the end of every kernel. The attention may be launched before the preceding pass has
finished (programmatic dependent launch), and then waits; its time counts from the end of the earlier kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .candidates import PreparedCandidate
from .timing import Turn, heat

# A kernel that only waits: its record precedes those of a candidate's settling calls, and those of its timed calls.
_MARKER = "spin_kernel"
_HEAT_SECONDS = 0.1


@dataclass(frozen=True)
class KernelRecord:
    """One kernel that ran: name, start and end in microseconds."""

    name: str
    start: float
    end: float


def attention_milliseconds(kernels: Iterable[KernelRecord], kernel_name: str | None) -> float | None:
    """The time of the kernels whose name contains `kernel_name` (None: all), each from the end of earlier ones.

    None when there is no such kernel.
    """
    total, reached, matches = 0.0, 0.0, False
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start, kernel.end)):
        if kernel_name is None or kernel_name in kernel.name:
            matches = True
            total += max(kernel.end - max(kernel.start, reached), 0.0)
        reached = max(reached, kernel.end)
    return total / 1e3 if matches else None


def split_at_markers(kernels: Iterable[KernelRecord]) -> list[list[KernelRecord]]:
    """The kernels after each marker, in the order of the markers."""
    parts: list[list[KernelRecord]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if _MARKER in kernel.name:
            parts.append([])
        elif parts:
            parts[-1].append(kernel)
    return parts


class KernelTimer:
    """Measures with the profiler. `problem` says why it does not work here, once that is known."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def measure(self, subjects: Mapping[str, PreparedCandidate], turns: Mapping[str, Turn]) -> dict[str, float]:
        """Milliseconds of the attention kernels of each subject's kernel call; nothing for those without a record."""
        times = {}
        for name, kernels in self._kernels(subjects, turns).items():
            milliseconds = attention_milliseconds(kernels, subjects[name].kernel_name)
            if milliseconds is not None:
                times[name] = milliseconds / turns[name].timed
        return times

    def _kernels(
        self, subjects: Mapping[str, PreparedCandidate], turns: Mapping[str, Turn]
    ) -> dict[str, list[KernelRecord]]:
        """The kernels of each subject's timed calls of its kernel call; nothing where the profiler fails."""
        if self.problem is not None:
            return {}
        torch.cuda.synchronize()
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                heat(_HEAT_SECONDS)  # starting the profiler takes a while; records before the first marker are ignored
                for name, subject in subjects.items():
                    for calls in turns[name]:
                        torch.cuda._sleep(1000)
                        for _ in range(calls):
                            subject.kernel_call.run()
                torch.cuda.synchronize()
        except RuntimeError as error:
            self.problem = f"the profiler does not start: {error}"
            return {}
        parts = split_at_markers(_records(profiler))[1::2]
        if len(parts) != len(subjects):
            self.problem = (
                f"the profiler recorded {len(parts)} of {len(subjects)} candidates (is CUPTI permitted here?)"
            )
            return {}
        return dict(zip(subjects, parts, strict=True))


def _records(profiler: profile) -> list[KernelRecord]:
    return [
        KernelRecord(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
