"""The one error of this package, and what its texts share."""

from __future__ import annotations

_MOST_LETTERS = 100
REINSTALL = "update or reinstall the pack"  # what helps against files that are not as they were released


class KernelUnavailable(RuntimeError):
    """The kernels of an architecture cannot be used; the message is the reason, written for the user."""


def shortened(text: str, most: int = _MOST_LETTERS) -> str:
    """What was found in a file, for a message: on one line, and cut where it is longer than `most` letters."""
    more = len(text) - most
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:most])
    return shown if more <= 0 else f"{shown}… ({more:,} more characters)"
