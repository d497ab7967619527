"""The one error of this package."""

from __future__ import annotations

REINSTALL = "update or reinstall the pack"  # what helps against files that are not as they were released


class KernelUnavailable(RuntimeError):
    """The kernels of an architecture cannot be used; the message is the reason, written for the user."""
