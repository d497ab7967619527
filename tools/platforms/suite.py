"""`make windows-tests` and `make arm-tests`: fetch what they need, then run the tests of one platform.

    python -m tools.platforms.suite windows

What cannot be had here, a program or a download, is told as NOT TESTED, with exit status 0: nothing was found wrong.
Exit status 1 when a test fails. Until its environment is made it needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from .. import suite
from ..environment import interpreter
from ..fetching import Unavailable
from . import arm_python, windows_python

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = ROOT / "requirements" / "platforms.txt"
SYSTEMS = {"windows": windows_python, "arm": arm_python}


def run_in_environment(system: str, venv: Path) -> int:
    """Make the environment, and run this command in it."""
    missing = SYSTEMS[system].missing_tools()
    if missing:
        return suite.not_tested(system, f"{', '.join(missing)} is not installed")
    try:
        suite.make_environment(venv, REQUIREMENTS)
    except Unavailable as error:
        return suite.not_tested(system, error)
    command = [str(interpreter(venv)), "-m", "tools.platforms.suite", system, "--venv", str(venv)]
    return subprocess.run(command, cwd=ROOT).returncode


def run(system: str) -> int:
    """Put the interpreters together and run the tests; the exit status."""
    try:
        SYSTEMS[system].prepare()
    except (Unavailable, OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        return suite.not_tested(system, error)
    # A test may compile for another platform, or run a whole suite in an emulator.
    return suite.run(system, Path(sys.executable), "--timeout", "3600", "tests/platforms", "-k", system)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-platforms")
    arguments = parser.parse_args()
    venv: Path = arguments.venv.resolve()
    return run(arguments.system) if Path(sys.prefix).resolve() == venv else run_in_environment(arguments.system, venv)


if __name__ == "__main__":
    sys.exit(main())
