"""Which tests execute the place of a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from .mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "build" / "mutation" / "executed.json"
# What .ci/run runs on any machine without an environment of its own.
TESTS = ("tests/unit", "tests/packaging")


@dataclass(frozen=True)
class Executed:
    """A test that passed.

    Attributes:
        name: its node id.
        seconds: what it took, with the lines counted.
        in_check: `make check` runs it.
        lines: path -> the lines it executes, as the bits of a number.
    """

    name: str
    seconds: float
    in_check: bool
    lines: dict[str, int]

    @property
    def file(self) -> str:
        """That of the test, from the root of the repository."""
        return self.name.partition("::")[0]

    def runs(self, mutant: Mutant) -> bool:
        """It executes the place of the mistake."""
        place = (2 << mutant.last_line) - (1 << mutant.line)
        return bool(self.lines.get(mutant.path, 0) & place)

    def uses(self, path: str) -> bool:
        """It executes something of a file."""
        return path in self.lines


def write_down(tests: Iterable[str] = TESTS) -> None:
    """Run the tests once and write down what each of them executes; this takes twice as long as the tests alone.

    SystemExit where pytest could not run them; some that fail are left out.
    """
    FILE.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.mutation.executed", *tests]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "COMFY_SAGE2_EXECUTED": str(FILE)}).returncode
    if status not in (0, 1):
        raise SystemExit(f"pytest ended with {status} before it ran all tests: see above, and run it again")


def read() -> list[Executed]:
    """What was written down, the quickest test first."""
    documents: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    tests = [
        Executed(
            name,
            found["seconds"],
            not found["slow"] and name.startswith("tests/unit/"),
            {path: int(lines, 16) for path, lines in found["lines"].items()},
        )
        for name, found in documents.items()
    ]
    return sorted(tests, key=lambda test: (test.seconds, test.name))


def without_removed(tests: Iterable[Executed]) -> list[Executed]:
    """Those that pytest still finds: a name that it does not know ends a run as a mistake would.

    subprocess.CalledProcessError where the tests cannot be collected.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *TESTS]
    found = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())
    return [test for test in tests if test.name in found]


def tests_of(mutant: Mutant, tests: Iterable[Executed], seconds: float) -> list[Executed]:
    """The tests that execute the place, as many as take `seconds` together.

    Of a place that is executed at import, those that import its module by name, which may only look at a constant, and
    then those that execute something of its file.
    """
    tests = list(tests)
    found = [test for test in tests if test.runs(mutant)]
    if not found:
        by_name = [(imports(_source(test.file), mutant.path), test) for test in tests]
        found = [test for is_named, test in by_name if is_named]
        found += [test for is_named, test in by_name if not is_named and test.uses(mutant.path)]
    chosen: list[Executed] = []
    total = 0.0
    for test in found:
        total += test.seconds
        if total > seconds and chosen:
            break
        chosen.append(test)
    return chosen


def imports(source: str, path: str) -> bool:
    """Whether a test's file imports the module at `path` by its name."""
    module = PurePosixPath(path).with_suffix("")
    package = ".".join(module.parent.parts)
    return f"from {package}.{module.stem} import" in source or any(
        module.stem in line.partition(" import ")[2].replace(",", " ").split()
        for line in source.splitlines()
        if line.startswith(f"from {package} import ")
    )


@cache
def _source(test_file: str) -> str:
    file = ROOT / test_file
    return file.read_text(encoding="utf-8") if file.is_file() else ""
