"""Text from outside (workflows, files): how messages and the log show it."""

from __future__ import annotations

import re
import reprlib

# C0 and C1 controls, line and paragraph separators, marks that reorder text, and lone surrogates, which no UTF-8
# stream can write.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_OF_AN_ERROR = 800  # characters; CUDA's longest texts have some 600
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80  # characters


def quoted(value: object) -> str:
    """`value` as Python writes it, shortened: safe to print, whatever it holds."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python raises for the longest integers
        return f"an integer of {value.bit_length()} bits"
    return one_line(_shown.repr(value))


def one_line(text: str) -> str:
    """`text` with everything escaped that could break a line of a log or change what a terminal shows."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def error_text(error: BaseException) -> str:
    """The message of another library's error in one line, cut because it may quote a file or driver at any length."""
    text = str(error)
    return one_line(text if len(text) <= _MOST_OF_AN_ERROR else text[:_MOST_OF_AN_ERROR] + "…")


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
