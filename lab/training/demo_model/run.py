"""One run of the training command: what it prints, when it saves and when its time is over."""

from __future__ import annotations

import time

import torch

from .state import TrainingState

_LINE_EVERY = 10.0
_CHECKPOINT_EVERY = 120.0


class TrainingRun:
    """Prints a line every ten seconds, asks for a checkpoint every two minutes, ends after ``stop_after`` seconds."""

    def __init__(self, stop_after: float | None = None):
        now = time.monotonic()
        self._end = None if stop_after is None else now + stop_after
        self._last_line = self._last_checkpoint = now
        self._sums: dict[str, torch.Tensor] = {}
        self._steps = 0

    @property
    def over(self) -> bool:
        """True when the run's own time is used up, whether or not training is done."""
        return self._end is not None and time.monotonic() >= self._end

    def has(self, seconds: float) -> bool:
        """True while the run has at least ``seconds`` of its own time left."""
        return self._end is None or time.monotonic() + seconds <= self._end

    def goes_on(self, state: TrainingState) -> bool:
        """True while there is both training left to do and time to do it."""
        return state.progress < 1 and not self.over

    def report(self, what: str, state: TrainingState, **values: torch.Tensor) -> None:
        """Count one step's values; the GPU is waited for only when a line is printed."""
        self._steps += 1
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY or not self.goes_on(state):
            means = "  ".join(f"{name} {total.item() / self._steps:.4f}" for name, total in self._sums.items())
            pace = self._steps / (now - self._last_line)
            clock = f"{what} {state.used_seconds:6.0f} s  step {state.step_count}  {pace:.2f} steps/s"
            print(f"{clock}  {means}", flush=True)
            self._sums, self._steps, self._last_line = {}, 0, now

    def checkpoint_due(self) -> bool:
        """True once every two minutes."""
        due = time.monotonic() - self._last_checkpoint >= _CHECKPOINT_EVERY
        if due:
            self._last_checkpoint = time.monotonic()
        return due
