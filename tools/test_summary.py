"""Say what the suites of tests did, in a line a folder what was skipped, and in capitals what did not run at all.

    python -m tools.test_summary

The last line counts the tests of all suites: "tests: 12 passed, 0 failed, 3 skipped". Exit status 1 when a test failed,
or when none ran: a run without tests is no success.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "build" / "test-suites"
SUITE = "COMFY_SAGE2_TEST_SUITE"  # names the suite under which a run of pytest is recorded
_MOST_REASONS = 4  # of a folder's in its line; pytest lists all of them above


def summary(records: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    """The text for these suites, by name, and whether tests ran and none failed."""
    lines, total = ["", "what ran"], Counter[str]()
    for suite, record in records.items():
        counts = record["counts"]
        total.update(counts)
        lines.append(f"  {suite:<12} {_in_words(counts)}")
        lines += [f"{'':<15}{_skipped(folder, reasons)}" for folder, reasons in record["skipped"].items()]
    for record in records.values():
        for path, reasons in record["skipped_as_a_whole"].items():
            lines.append(_not_tested(path, "; ".join(reasons), sum(reasons.values())))
    good = total["passed"] > 0 and not total["failed"] and not total["error"]
    if not total["passed"]:
        lines.append("*** NO TEST RAN ***")
    # Whatever runs this may read the counts from here.
    lines.append(f"tests: {_in_words(total)}")
    return "\n".join(lines), good


def not_tested(suite: str, reason: str) -> str:
    """Record that nothing of a suite could be run here, and why; the line that says so.

    Where the disk is too full for the record, the line is all there is.
    """
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    record = {"counts": counts, "skipped": {}, "skipped_as_a_whole": {suite: {reason: 0}}}
    path = FOLDER / f"{suite}.json"
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        reason += f" (and this cannot be recorded: {error})"
    return _not_tested(suite, reason, 0)


def _not_tested(what: str, reason: str, count: int) -> str:
    known = f" ({count} TESTS)" if count else ""
    return f"*** NOT TESTED: {what.upper()}{known}: {reason} ***"


def _skipped(folder: str, reasons: Mapping[str, int]) -> str:
    """What was skipped in a folder, in one line: the reasons given most often, each with its count."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    shown = [f"{reason} ({count})" if len(ordered) > 1 else reason for reason, count in ordered[:_MOST_REASONS]]
    others = len(ordered) - len(shown)
    more = [f"{others} other {'reason' if others == 1 else 'reasons'}, above"] if others else []
    return f"{folder}: {sum(reasons.values())} skipped: {'; '.join(shown + more)}"


def _in_words(counts: Mapping[str, int]) -> str:
    failed = counts["failed"] + counts["error"]
    return f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped"


def read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The records in the order in which they were written, by suite, and the paths of those that cannot be read."""
    records, unreadable = {}, []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        try:
            records[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            unreadable.append(str(path))
    return records, unreadable


def main() -> int:
    """The command."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    records, unreadable = read(FOLDER)
    for path in unreadable:
        print(f"*** {path} CANNOT BE READ: THE SUITE WAS STOPPED OR THE DISK IS FULL ***")
    text, good = summary(records)
    print(text)
    return 0 if good and not unreadable else 1


if __name__ == "__main__":
    sys.exit(main())
