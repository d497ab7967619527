"""What a run of tests did: said at its end, and recorded for the summary of `make test`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "build" / "test-suites"
SUITE = "COMFY_SAGE2_TEST_SUITE"


def file_of(test: str) -> str:
    """The file of a test's node id."""
    return test.partition("::")[0]


def skipped_as_a_whole(ran: Iterable[str], skipped: Mapping[str, str]) -> dict[str, Counter[str]]:
    """The largest folders and files in which not one test ran: path -> reasons and how often each was given.

    ran: node ids. skipped: node id -> reason.
    """
    alive = {"tests"}
    for test in ran:
        path = Path(file_of(test))
        alive |= {path.as_posix(), *(parent.as_posix() for parent in path.parents)}
    found: dict[str, Counter[str]] = {}
    for test, reason in skipped.items():
        path = Path(file_of(test))
        dead = [part.as_posix() for part in (path, *path.parents) if part.as_posix() not in alive | {"."}]
        if dead:
            found.setdefault(dead[-1], Counter())[reason] += 1
    return found


def record(reporter: pytest.TerminalReporter) -> dict[str, Any]:
    """The session so far, ready for JSON."""
    counts = {kind: len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    skipped = {report.nodeid: _reason(report) for report in reporter.stats.get("skipped", ())}
    ran = [report.nodeid for kind in ("passed", "failed", "error") for report in reporter.stats.get(kind, ())]
    by_folder: dict[str, Counter[str]] = {}
    for test, reason in skipped.items():
        by_folder.setdefault(Path(file_of(test)).parent.as_posix(), Counter())[reason] += 1
    return {"counts": counts, "skipped": by_folder, "skipped_as_a_whole": skipped_as_a_whole(ran, skipped)}


def _reason(report: Any) -> str:
    """Why a test was skipped; its report holds file, line and "Skipped: reason"."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say last what was skipped as a whole; with a suite named in the environment, write the record."""
    yield
    found = record(terminalreporter)
    for path, reasons in found["skipped_as_a_whole"].items():
        for reason, count in reasons.items():
            terminalreporter.write_line(f"NOT TESTED: {path.upper()} ({count} TESTS): {reason}", red=True)
    suite = os.environ.get(SUITE)
    if suite:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{suite}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
