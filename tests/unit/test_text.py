"""Text from outside is harmless wherever it is printed."""

from __future__ import annotations

from typing import Any

import torch

from comfy_sage2.text import error_text, one_line, quoted

HOSTILE = (
    "surrogate \ud800",
    "newline\n2026-01-01 [ERROR] forged",
    "\x1b[31mescape",
    "null\0",
    "\x9b31m C1 control",
    "line separator\u2028b",
    "reordered \u202egnp.exe",
    "long" * 1_000_000,
)
BREAKS_A_LINE = {"\n", "\r", "\x1b", "\x9b", "\u2028", "\u202e", "\0"}


def test_hostile_text_becomes_one_line() -> None:
    for text in HOSTILE:
        for shown in (quoted(text), one_line(text[:1000]), error_text(ValueError(text))):
            shown.encode("utf-8")
            assert len(shown) < 3000 and not BREAKS_A_LINE & set(shown), shown[:100]


def test_quoted_text_is_always_short() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    values = 10**5000, [10**400] * 1000, {"a": "x" * 10_000}, deep, "x" * 10_000, None, float("nan"), torch.zeros(2, 2)
    for value in values:
        assert len(quoted(value)) < 500 and "\n" not in quoted(value)


def test_one_line_keeps_ordinary_text() -> None:
    assert one_line("CUDA error: größer\nat line 3\t\x1b[0m") == "CUDA error: größer\\nat line 3\\t\\x1b[0m"
