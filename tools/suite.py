"""Run a suite of tests in an environment of its own, or say that it cannot be had here.

    python -m tools.suite torch-2.6 --venv .venv-torch-2.6 --requirements requirements/torch-2.6.txt -- tests/unit/core

What stands behind -- goes to pytest. What cannot be had is told as NOT TESTED, with exit status 0: nothing was found
wrong. It needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import test_summary
from .environment import Environment, existing_file, interpreter
from .fetching import Unavailable

ROOT = Path(__file__).resolve().parents[1]


def make_environment(
    folder: Path, requirements: Path, seconds: float | None = None, needed_gigabytes: float = 0.0
) -> None:
    """Install the file of requirements into `folder`, unless that is done.

    Unavailable when that fails, would take more than `seconds`, or finds less of the disk free.
    """
    environment = Environment(folder, requirements.read_text(encoding="utf-8"))
    if environment.is_current:
        return
    if seconds is not None and seconds <= 0.0:
        raise Unavailable("no time was left to make its environment; --minutes gives more")
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < needed_gigabytes:
        raise Unavailable(f"{free:.0f} GB of disk are free, {needed_gigabytes:.0f} are needed")
    environment.make(f"installing {folder.name}", ("--requirement", str(requirements)), seconds=seconds)


def run(suite: str, python: Path, *arguments: str) -> int:
    """Run pytest with these arguments and record it under the suite's name; its exit status."""
    command = [str(python), "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, test_summary.SUITE: suite}).returncode


def not_tested(suite: str, reason: object) -> int:
    """Say that nothing of a suite could be run here, and why; the exit status."""
    print(test_summary.not_tested(suite, str(reason)), flush=True)
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", help="its name in the summary")
    parser.add_argument("--venv", type=Path, required=True, help="folder of its environment")
    parser.add_argument("--requirements", type=existing_file, required=True, help="requirements file to install")
    parser.add_argument("--minutes", type=float, default=30.0, help="for making the environment, default 30")
    parser.add_argument("--gigabytes", type=float, default=0.0, help="of disk that making it needs")
    parser.add_argument("arguments", nargs="+", help="of pytest")
    given = parser.parse_args()
    try:
        make_environment(given.venv, given.requirements, given.minutes * 60.0, given.gigabytes)
    except Unavailable as error:
        return not_tested(given.suite, error)
    return run(given.suite, interpreter(given.venv), *given.arguments)


if __name__ == "__main__":
    sys.exit(main())
