"""Run a suite of tests in an environment of its own, or say that it cannot be had here.

    python -m tools.suite modalities --venv .venv-modalities --requirements requirements/modalities.txt tests/modalities

An environment that cannot be made here is told as NOT TESTED, with exit status 0: nothing was found wrong. Otherwise
the exit status is pytest's. It needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from . import test_summary
from .environment import Environment, interpreter
from .fetching import Unavailable

ROOT = Path(__file__).resolve().parents[1]


def make_environment(folder: Path, requirements: Path, seconds: float | None = None) -> None:
    """Install the file of requirements into `folder`. Unavailable when that fails or takes more than `seconds`."""
    environment = Environment(folder, requirements.read_text(encoding="utf-8"))
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
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--requirements", type=Path, required=True, help="requirements file to install")
    parser.add_argument("tests", nargs="+", help="files and folders of tests")
    arguments = parser.parse_args()
    try:
        make_environment(arguments.venv, arguments.requirements)
    except Unavailable as error:
        return not_tested(arguments.suite, error)
    return run(arguments.suite, interpreter(arguments.venv), *arguments.tests)


if __name__ == "__main__":
    sys.exit(main())
