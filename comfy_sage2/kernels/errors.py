"""The one error of this package."""

from __future__ import annotations

_MOST_LETTERS = 100


class KernelUnavailable(RuntimeError):
    """The kernels of an architecture cannot be used; the message is the reason, written for the user."""


def quoted(text: str) -> str:
    """What was found in a file, for a message: in quotation marks, and cut where it is long."""
    shown = repr(text[:_MOST_LETTERS])
    return shown if len(text) <= _MOST_LETTERS else f"{shown} and {len(text) - _MOST_LETTERS:,} more characters"
