"""What became of the mistakes: build/mutation, and a section of docs/results/reliability.md."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RECORDS = ROOT / "build" / "mutation"
PAGE = ROOT / "docs" / "results" / "reliability.md"
TITLE = "## Mistakes put into the code"


@dataclass(frozen=True)
class Part:
    """A part of the library: patterns of its files, and tests that run it in programs of their own."""

    files: list[str]
    tests: list[str]


PARTS = {name: Part(**part) for name, part in json.loads((HERE / "parts.json").read_text(encoding="utf-8")).items()}

HEAD = """{title}

- Machine: {machine}.
- Command: `make mutations`. It writes this section.

One mistake at a time: another number, comparison or operation, a condition, a statement, an argument or an element \
of a key left out. Each meets the tests that execute its place: those of `make check` first, then the others of \
tests/unit and tests/packaging. A random choice of {most} of each part's mistakes, of all that are not known to \
change nothing (tools/mutation/equivalent.json says why).

| part | mistakes | known to change nothing | tried | noticed | of these by `make check` | share noticed |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Result:
    """What became of a mistake.

    Attributes:
        part: a key of PARTS.
        mutant: the mistake.
        killer: the test that noticed, or "time" or "import"; None where none did.
        in_check: it is one that `make check` runs.
    """

    part: str
    mutant: Mutant
    killer: str | None
    in_check: bool


def _equivalents() -> set[tuple[str, str, str, str]]:
    entries: list[Mapping[str, Any]] = json.loads((HERE / "equivalent.json").read_text(encoding="utf-8"))
    return {(entry["path"], entry["line"], entry["before"], entry["after"]) for entry in entries}


EQUIVALENT = _equivalents()


def is_equivalent(mutant: Mutant) -> bool:
    """It is known to change nothing that a caller could see."""
    return (mutant.path, mutant.source_line, mutant.before, mutant.after) in EQUIVALENT


def keep(part: str, made: int, known: int, results: Sequence[Result]) -> None:
    """Write down a part's figures and the mistakes that no test noticed."""
    noticed = [result for result in results if result.killer is not None]
    record = {
        "made": made,
        "known": known,
        "tried": len(results),
        "noticed": len(noticed),
        "in_check": sum(result.in_check for result in noticed),
        "survivors": sorted(str(result.mutant) for result in results if result.killer is None),
        "killers": Counter(str(result.killer).partition("::")[0] for result in noticed),
    }
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"part-{part}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def section() -> str:
    """The section, of the parts that were tried."""
    records = {part: RECORDS / f"part-{part}.json" for part in PARTS}
    found = {part: json.loads(path.read_text(encoding="utf-8")) for part, path in records.items() if path.exists()}
    columns = ("made", "known", "tried", "noticed", "in_check")
    total = {column: sum(record[column] for record in found.values()) for column in columns}
    rows = [_row(part, record) for part, record in (*found.items(), ("all", total))]
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, without a GPU"
    most = max(record["tried"] for part, record in found.items())
    survivors = [f"- `{survivor}`" for record in found.values() for survivor in record["survivors"]]
    lines = [*rows, *(["", "Not noticed:", "", *survivors] if survivors else [])]
    return HEAD.format(title=TITLE, machine=machine, most=most) + "\n".join(lines) + "\n"


def _row(part: str, record: Mapping[str, Any]) -> str:
    figures = [f"{record[column]:,}" for column in ("made", "known", "tried", "noticed", "in_check")]
    share = f"{record['noticed'] / record['tried']:.1%}"
    return f"| {' | '.join((part, *figures, share))} |"


def write() -> None:
    """Put the section in the place of the page's."""
    before = PAGE.read_text(encoding="utf-8").partition(TITLE)[0].rstrip("\n")
    PAGE.write_text(f"{before}\n\n{section()}", encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
