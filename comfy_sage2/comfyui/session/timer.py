"""Measuring how long work on a device takes, by its clock or the CPU's."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from ...system.stream import current_stream


class Timer:
    """A running or stopped measurement. This base class measures nothing."""

    def stop(self) -> None:
        """End the measurement, which covers all work enqueued so far."""

    def seconds(self) -> float:
        """The time between start and stop; may wait for the device."""
        return 0.0


NO_TIMER = Timer()  # of a call whose time is never read


class _CpuTimer(Timer):
    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._elapsed = 0.0

    def stop(self) -> None:
        self._elapsed = time.perf_counter() - self._started

    def seconds(self) -> float:
        return self._elapsed


class _CudaTimer(Timer):
    def __init__(self, device: torch.device) -> None:
        self._stream = _stream_of(device.index, current_stream(device))
        self._started = torch.cuda.Event(enable_timing=True)
        self._stopped = torch.cuda.Event(enable_timing=True)
        self._started.record(self._stream)

    def stop(self) -> None:
        self._stopped.record(self._stream)

    def seconds(self) -> float:
        self._stopped.synchronize()
        return float(self._started.elapsed_time(self._stopped)) / 1000.0


@lru_cache(maxsize=64)
def _stream_of(index: int | None, handle: int) -> torch.cuda.Stream:
    """The stream of this handle, the current one of GPU `index`. Cached, because making the object takes 6 us."""
    return torch.cuda.current_stream(index)


def start_timer(device: torch.device) -> Timer:
    # Events in a graph capture cannot be timed, so the CPU's time of the capture stands in.
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return _CudaTimer(device)
    return _CpuTimer()
