"""Printing where the console cannot show every letter."""

from __future__ import annotations

import io
import sys


def print_any_letters() -> None:
    """Have what the console's encoding lacks printed as an escape, instead of ending the program with an error.

    A user's folder may hold any letters, and a pipe on Windows takes those of one code page.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
