"""The progress of a command: one line that is rewritten on a terminal, or a line for each part in a file."""

from __future__ import annotations

import sys
from typing import TextIO

_LABEL_WIDTH, _BAR_WIDTH = 24, 30


class ProgressBar:
    """Context manager around work of known size, called with the share that is done, 0 to 1.

    part: a file gets a line whenever the share has grown by this much.
    """

    def __init__(self, label: str, stream: TextIO | None = None, *, part: float = 0.1) -> None:
        self._label = label
        self._part = part
        self._stream = stream if stream is not None else sys.stdout
        self._is_terminal = self._stream.isatty()
        self._written = 0.0

    def __enter__(self) -> ProgressBar:
        self(0.0)
        return self

    def __call__(self, share: float) -> None:
        if self._is_terminal:
            self._draw(share, end="")
        elif share - self._written > self._part - 1e-6 and share < 1.0:
            self._draw(share, end="\n")
            self._written = share

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._draw(1.0, end="\n")
        elif self._is_terminal:
            self._stream.write("\n")

    def _draw(self, share: float, end: str) -> None:
        filled = round(_BAR_WIDTH * min(max(share, 0.0), 1.0))
        start = "\r" if self._is_terminal else ""
        self._stream.write(f"{start}{self._label:<{_LABEL_WIDTH}} [{'#' * filled:<{_BAR_WIDTH}}] {share:4.0%}{end}")
        self._stream.flush()
