"""Printing where the console cannot show every letter, or nothing at all."""

from __future__ import annotations

import io
import os
import sys


def print_any_letters() -> None:
    """Have what the console's encoding lacks printed as an escape, instead of ending the program with an error.

    A user's folder may hold any letters, and a pipe on Windows takes those of one code page.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print `text` where somebody listens: a closed pipe or a full disk does not change what a command answers."""
    try:
        print(text, flush=True)
    except OSError:
        # Python writes the rest once more when it ends, and would end with an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
