"""Times calls in rounds, each of which runs every call, in a new random order.

So whatever slows the GPU down for a while affects all calls alike, and the median of a call's rounds leaves it out.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from ..autotune.timings import FEWEST_ROUNDS
from ..system.memory import is_out_of_memory

MOST_ROUNDS = 7
_LEAST = 0.1  # seconds of rounds, even if loading kernels took all the time: three rounds alone say little
_VISIT = 1.5e-4  # seconds of GPU time that a visit fills with calls of the same kind
_MOST_CALLS = 4
# GPU clocks for each call, about 0.1 ms at first: the head start of the CPU when timing begins.
_HEAD_STARTS = (180_000, 360_000, 720_000, 1_440_000)

Key = TypeVar("Key", bound=Hashable)
Progress = Callable[[int, int], None]  # takes the number of finished parts of a measurement and of all parts


def unseen(finished: int, parts: int) -> None:
    """A progress that shows nothing."""


class GpuClock:
    """Times calls by CUDA events on the current stream. The GPU waits until all calls are enqueued.

    host: call -> for each visit, the seconds for which one of its calls occupied this thread.
    progress: called before the first visits and before each round.
    """

    def __init__(self, progress: Progress = unseen) -> None:
        self.progress = progress
        self.host: defaultdict[Callable[[], object], list[float]] = defaultdict(list)
        self._needed: dict[Callable[[], object], int] = {}  # the index of the last head start that sufficed

    def visit(self, run: Callable[[], object], calls: int) -> float:
        """GPU seconds for one of `calls` calls in a row, which run again if the GPU did not wait long enough."""
        for number in range(self._needed.get(run, 0), len(_HEAD_STARTS)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HEAD_STARTS[number] * calls)
            start.record()
            begin = self.now()
            for _ in range(calls):
                run()
            self.host[run].append((self.now() - begin) / calls)
            too_short = start.query()
            end.record()
            end.synchronize()
            self._needed[run] = number
            if not too_short:
                break
        return float(start.elapsed_time(end)) / 1e3 / calls

    def now(self) -> float:
        return time.perf_counter()


def time_rounds(
    runs: Mapping[Key, Callable[[], object]], clock: GpuClock, rng: random.Random, deadline: float
) -> dict[Key, list[float]]:
    """The seconds of each call in each round: 3 to 7 rounds, as many as end before `deadline`, a time of `clock`.

    Rounds that fit into 0.1 s run even after it. A first visit, which is not counted, loads and compiles; a call that
    raises RuntimeError or ValueError in a visit is left out.
    """
    calls: dict[Key, int] = {}
    clock.progress(0, 1 + MOST_ROUNDS)
    for key, run in runs.items():
        duration = None if _visited(clock, run, 1) is None else _visited(clock, run, 1)
        if duration is not None:
            calls[key] = min(max(round(_VISIT / max(duration, 1e-9)), 1), _MOST_CALLS)
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    order = list(calls)
    begin = clock.now()
    deadline = max(deadline, begin + _LEAST)
    for finished in range(1, MOST_ROUNDS + 1):
        clock.progress(finished, 1 + MOST_ROUNDS)
        rng.shuffle(order)
        for key in list(order):
            visited = _visited(clock, runs[key], calls[key])
            if visited is None:
                order.remove(key)
                del seconds[key]
            else:
                seconds[key].append(visited)
        elapsed = clock.now() - begin
        if finished >= FEWEST_ROUNDS and elapsed + elapsed / finished > deadline - begin:
            break
    return seconds


def _visited(clock: GpuClock, run: Callable[[], object], calls: int) -> float | None:
    """As `GpuClock.visit`; None if the call has no kernel. Other packages' attentions may fail at any call."""
    try:
        return clock.visit(run, calls)
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return None
