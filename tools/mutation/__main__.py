"""Put mistakes into the library one at a time and count those that a test notices.

    python -m tools.mutation [--part NAME] [--most 40] [--jobs 2] [--keep-executed] [--seed N]

First all tests run once, and what lines each executes is written down. Then each mistake meets the tests that execute
its place: those of `make check`, the quickest first, then the others. The table in docs/results/reliability.md is
renewed; build/mutation has a file for each part, with the mistakes that no test noticed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Before the library: each trial is a fork that has them.
import pytest  # noqa: F401
import torch  # noqa: F401

from . import report, selection
from .mutants import Mutant, mutants_of
from .report import Result
from .selection import Executed
from .trial import Copy, Trial

ROOT = Path(__file__).resolve().parents[2]
CHECK_SECONDS = 60.0  # of tests of `make check` that one mistake meets, as they took with their lines counted
OTHER_SECONDS = 120.0
READERS = ("tests/unit/test_values.py",)  # read the library's source, and so execute none of its lines
SPARE_SECONDS = 300.0  # that a trial may take beside its tests, before it counts as one that never ends


def of_part(part: str) -> list[Mutant]:
    """All mistakes of a part that are not known to change nothing."""
    found = []
    for pattern in report.PARTS[part].files:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            found += mutants_of(name, path.read_text(encoding="utf-8"))
    return found


class Trials:
    """Mistakes that meet their tests, as many at once as there are copies of the repository."""

    def __init__(self, tests: list[Executed], copies: list[Copy]) -> None:
        self._tests = tests
        self._copies = copies
        self._sound: dict[str, bool] = {}

    def run(self, part: str, mutants: list[Mutant]) -> list[Result]:
        """What became of each."""
        free, waiting, results = list(self._copies), list(mutants), list[Result]()
        running: list[tuple[Mutant, Iterator[Trial], Trial]] = []
        while waiting or running:
            while waiting and free:
                mutant = waiting.pop(0)
                copy = free.pop()
                trials = self._trials_of(part, mutant, copy)
                first = next(trials, None)
                if first is not None:
                    running.append((mutant, trials, first))
                    continue
                free.append(copy)
                results.append(Result(part, mutant, None, in_check=False))
                print(f"SURVIVES {mutant}: no test executes it", flush=True)
            for item in list(running):
                mutant, trials, trial = item
                killer = trial.killer()
                if killer is None:
                    continue
                running.remove(item)
                is_killed = bool(killer) and self._is_sound(killer, trial.copy)
                following = None if is_killed else next(trials, None)
                if following is not None:
                    running.append((mutant, trials, following))
                    continue
                free.append(trial.copy)
                results.append(Result(part, mutant, killer if is_killed else None, trial.in_check))
                print(f"{'noticed ' if is_killed else 'SURVIVES'} {mutant} {killer}", flush=True)
            time.sleep(0.02)
        return results

    def _trials_of(self, part: str, mutant: Mutant, copy: Copy) -> Iterator[Trial]:
        """With the tests of `make check` first; the last trial is with those that this part has in programs."""
        for in_check, seconds in ((True, CHECK_SECONDS), (False, OTHER_SECONDS)):
            chosen = selection.tests_of(mutant, (test for test in self._tests if test.in_check == in_check), seconds)
            names = [test.name for test in chosen]
            if not in_check:
                names += [*report.PARTS[part].tests, *READERS]
            most = SPARE_SECONDS + 3 * sum(test.seconds for test in chosen)
            if names:
                yield Trial.start(copy, mutant, names, most, in_check=in_check)

    def _is_sound(self, killer: str, copy: Copy) -> bool:
        """The test passes without a mistake. A run that ended otherwise than by a test is the mistake's doing."""
        if "::" not in killer:
            return True
        if killer not in self._sound:
            trial = Trial.start(copy, None, [killer], 2 * SPARE_SECONDS, in_check=False)
            while (failed := trial.killer()) is None:
                time.sleep(0.02)
            self._sound[killer] = not failed
        return self._sound[killer]


def main() -> int:
    """The command."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__, formatter_class=formatter)
    parser.add_argument("--part", action="append", choices=report.PARTS, help="this part alone; several times for more")
    parser.add_argument("--most", type=int, default=40, help="mistakes of a part, taken at random; 0: all")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="of the random choice: the day")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--keep-executed", action="store_true", help="what each test executes is known from before")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if arguments.keep_executed:
        tests = selection.without_removed(selection.read())
    else:
        selection.write_down()
        tests = selection.read()
    with tempfile.TemporaryDirectory(prefix="comfy-sage2-mutation-") as folder:
        copies = [Copy.make(Path(folder)) for _ in range(arguments.jobs)]
        trials = Trials(tests, copies)
        for part in arguments.part or report.PARTS:
            mutants = of_part(part)
            left = [mutant for mutant in mutants if not report.is_equivalent(mutant)]
            chosen = left
            if arguments.most:
                chosen = random.Random(arguments.seed).sample(left, min(arguments.most, len(left)))
            report.keep(part, len(mutants), len(mutants) - len(left), trials.run(part, chosen))
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
