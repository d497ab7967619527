"""Run a suite of tests in an environment of its own, or say that it cannot be had here.

What cannot be had is told as NOT TESTED, with exit status 0: nothing was found wrong. It needs nothing but the standard
library.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from . import test_summary
from .environment import Environment

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
