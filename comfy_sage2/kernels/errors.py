"""The one error of this package."""

from __future__ import annotations

from ..text import one_line

_MOST_LETTERS = 100


class KernelUnavailable(RuntimeError):
    """The kernels of an architecture cannot be used; the message is the reason, written for the user."""


def shortened(text: str) -> str:
    """What was found in a file, for a message: on one line, and cut where it is long."""
    more = len(text) - _MOST_LETTERS
    return one_line(text if more <= 0 else f"{text[:_MOST_LETTERS]}… ({more:,} more characters)")
