"""`make torch-tests`: core, compiler and ComfyUI's calls with other versions of torch than the pinned one.

    python -m tools.torch_tests [--minutes 30] 2.6 2.8 newest

Each version has an environment of its own, made from requirements/torch-VERSION.txt: pip may fetch gigabytes for it, or
finds them where its own configuration says. A version that cannot be had here in time is told as NOT TESTED. Exit
status 1 when a test fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from .environment import Environment, interpreter
from .test_summary import not_tested

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("tests/unit/core", "tests/unit/comfyui_adapter")
# An environment takes some 6 GB, and pip keeps what it fetches, packed, beside it until the end.
NEEDED_BYTES = 12 << 30


def problem_of(folder: Path, requirements: Path, seconds: float) -> str | None:
    """Make the environment `folder` unless it is there; why it cannot be made, or None."""
    if Environment(folder, requirements.read_text(encoding="utf-8")).is_current:
        return None
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        return f"{free / 1e9:.0f} GB of disk are free, {NEEDED_BYTES / 1e9:.0f} are needed"
    command = [sys.executable, "-m", "tools.environment", "--venv", str(folder), "--requirements", str(requirements)]
    making = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        status = making.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        os.killpg(making.pid, signal.SIGKILL)  # pip is a child of it
        making.wait()
        return "its environment was not made in time; --minutes gives it more"
    return None if status == 0 else f"{requirements.name} cannot be installed, see above"


def test(folder: Path, suite: str) -> int:
    """Run the tests in the environment `folder`; pytest's exit status."""
    command = [str(interpreter(folder)), "-m", "pytest", "-q", *SUITES]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "COMFY_SAGE2_TEST_SUITE": suite}).returncode


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of requirements/torch-VERSION.txt")
    parser.add_argument("--minutes", type=float, default=30.0, help="for making all environments together, default 30")
    arguments = parser.parse_args()
    left, failed = arguments.minutes * 60.0, False
    for version in arguments.versions:
        folder, suite = ROOT / f".venv-torch-{version}", f"torch-{version}"
        started = time.monotonic()
        problem = problem_of(folder, ROOT / "requirements" / f"{suite}.txt", left)
        left -= time.monotonic() - started
        if problem is not None:
            print(not_tested(suite, problem), flush=True)
        elif test(folder, suite) != 0:
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
