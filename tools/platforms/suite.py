"""`make windows-tests` and `make arm-tests`: fetch what they need, then run the tests of one platform.

    python -m tools.platforms.suite windows

What cannot be had here, a program or a download, is told as NOT TESTED, with exit status 0: nothing was found wrong.
Exit status 1 when a test fails. Until its environment is made it needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from .. import test_summary
from ..environment import interpreter
from . import arm_python, windows_python
from .fetching import Unavailable

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = ROOT / "requirements" / "platforms.txt"
SYSTEMS = {"windows": windows_python, "arm": arm_python}


def _not_tested(system: str, reason: str) -> int:
    """Say that nothing was tested; the exit status."""
    print(test_summary.not_tested(system, reason), flush=True)
    return 0


def run_in_environment(system: str, venv: Path) -> int:
    """Make the environment, and run this command in it."""
    missing = SYSTEMS[system].missing_tools()
    if missing:
        return _not_tested(system, f"{', '.join(missing)} is not installed")
    make = [sys.executable, "-m", "tools.environment", "--venv", str(venv), "--requirements", str(REQUIREMENTS)]
    if subprocess.run(make, cwd=ROOT).returncode != 0:
        return _not_tested(system, f"{REQUIREMENTS.name} cannot be installed, see above")
    command = [str(interpreter(venv)), "-m", "tools.platforms.suite", system, "--venv", str(venv)]
    return subprocess.run(command, cwd=ROOT).returncode


def run(system: str) -> int:
    """Put the interpreters together and run the tests; the exit status."""
    try:
        SYSTEMS[system].prepare()
    except Unavailable as error:
        return _not_tested(system, str(error))
    # A test may compile for another platform, or run a whole suite in an emulator.
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "3600", "tests/platforms", "-k", system]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "COMFY_SAGE2_TEST_SUITE": system}).returncode


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
