"""Printing where the console cannot show every letter, or nothing at all."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap


def print_any_letters() -> None:
    """Have what the console's encoding lacks printed as an escape, instead of ending the program with an error.

    A user's folder may hold any letters, and a pipe on Windows takes those of one code page.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def in_width(text: str, indent: int) -> str:
    """`text` with its long lines broken at spaces, where a terminal would break them in the middle of a word.

    An indented line goes on behind `indent` letters, any other one behind two. Where nobody looks at a terminal the
    text stays as it is: lines of a file or a pipe are searched, and pasted.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    width = max(shutil.get_terminal_size().columns, 2 * indent)
    rows = []
    for line in text.splitlines():
        behind = " " * (indent if line.startswith(" ") else 2)
        rows += textwrap.wrap(
            line, width, subsequent_indent=behind, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(rows)


def say(text: str) -> None:
    """Print `text` where somebody listens: a closed pipe or a full disk does not change what a command answers."""
    try:
        print(text, flush=True)
    except OSError:
        # Python writes the rest once more when it ends, and would end with an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
