"""A plugin of pytest that writes down which lines of the library each test executes.

    COMFY_SAGE2_EXECUTED=FILE python -m pytest -p tools.mutation.executed tests/unit

FILE becomes JSON: node id -> its seconds, whether it is marked slow, and path -> the lines, as the bits of a number in
hexadecimal digits; none of a test that only looks at constants. Tests that fail or are skipped are not in it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "comfy_sage2"


class Lines:
    """The lines of the library that run while it traces: path from the root of the repository -> lines."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}
        self._of_file: dict[str, set[int] | None] = {}

    def clear(self) -> None:
        """Forget them."""
        self.seen.clear()
        self._of_file.clear()

    def _lines(self, file: str) -> set[int] | None:
        if file not in self._of_file:
            path = Path(file)
            is_ours = file.startswith(str(LIBRARY)) and path.is_file()
            self._of_file[file] = self.seen.setdefault(path.relative_to(ROOT).as_posix(), set()) if is_ours else None
        return self._of_file[file]

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """For sys.settrace: called when a function starts."""
        lines = self._lines(frame.f_code.co_filename)
        if lines is None:
            return None

        def local(frame: FrameType, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return local

        lines.add(frame.f_lineno)
        return local


LINES = Lines()
TESTS: dict[str, dict[str, Any]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace setup, call and teardown."""
    LINES.clear()
    start = time.perf_counter()
    threading.settrace(LINES.trace)
    sys.settrace(LINES.trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        lines = {path: f"{sum(1 << line for line in seen):x}" for path, seen in LINES.seen.items() if seen}
        found = TESTS.setdefault(item.nodeid, {"passed": False})
        found["seconds"] = round(time.perf_counter() - start, 3)
        found["slow"] = item.get_closest_marker("slow") is not None
        found["lines"] = lines


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Which tests passed."""
    found = TESTS.setdefault(report.nodeid, {"passed": False})
    if report.when == "call":
        found["passed"] = report.passed
    elif report.failed:
        found["passed"] = False


def pytest_sessionfinish() -> None:
    """Write the file."""
    passed = {test: found for test, found in TESTS.items() if found.pop("passed")}
    Path(os.environ["COMFY_SAGE2_EXECUTED"]).write_text(json.dumps(passed), encoding="utf-8")
