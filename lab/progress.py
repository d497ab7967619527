"""What a command is doing: a line that is rewritten on a terminal, few lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_LABEL_WIDTH = 24
_BAR_WIDTH = 30
_DETAIL_WIDTH = 50
_LINE_EVERY = 15.0  # seconds between the lines of an activity in a log


class ProgressBar:
    """Context manager around work of known size, called with the share that is done, 0 to 1."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream if stream is not None else sys.stdout
        self._live = self._stream.isatty()

    def __enter__(self) -> ProgressBar:
        self(0.0)
        return self

    def __call__(self, share: float) -> None:
        if self._live:
            self._draw(share, end="")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._draw(1.0, end="\n")
        elif self._live:
            self._stream.write("\n")

    def _draw(self, share: float, end: str) -> None:
        filled = round(_BAR_WIDTH * min(max(share, 0.0), 1.0))
        start = "\r" if self._live else ""
        self._stream.write(f"{start}{self._label:<{_LABEL_WIDTH}} [{'#' * filled:<{_BAR_WIDTH}}] {share:4.0%}{end}")
        self._stream.flush()


class Activity:
    """Context manager around work of unknown size, called with what it does now: seconds so far, and that."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream if stream is not None else sys.stdout
        self._live = self._stream.isatty()
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Activity:
        self._start = self._last_line = time.monotonic()
        self("")
        return self

    def __call__(self, detail: str = "") -> None:
        now = time.monotonic()
        if self._live:
            self._write(detail, start="\r", end="")
        elif now - self._last_line >= _LINE_EVERY:
            self._last_line = now
            self._write(detail, start="", end="\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("done" if kind is None else "failed", start="\r" if self._live else "", end="\n")

    def _write(self, detail: str, start: str, end: str) -> None:
        line = f"{self._label:<{_LABEL_WIDTH}} {time.monotonic() - self._start:4.0f} s  {detail[:_DETAIL_WIDTH]}"
        self._stream.write(
            start + (f"{line:<{_LABEL_WIDTH + _DETAIL_WIDTH + 8}}" if self._live else line.rstrip()) + end
        )
        self._stream.flush()
