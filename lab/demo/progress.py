"""A progress bar on a terminal, a line for each finished part elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

_WIDTH = 30


class ProgressBar:
    """Context manager around one part of the work, called with the share that is done."""

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
        filled = round(_WIDTH * min(max(share, 0.0), 1.0))
        start = "\r" if self._live else ""
        self._stream.write(f"{start}{self._label:<24} [{'#' * filled:<{_WIDTH}}] {share:4.0%}{end}")
        self._stream.flush()
