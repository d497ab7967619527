"""`make torch-tests`: core, calls of ComfyUI and integrations with other versions of torch than the pinned one.

    python -m tools.torch_tests [--minutes 30] 2.6 2.8 newest

Each version has an environment of its own, made from requirements/torch-VERSION.txt: pip may fetch gigabytes for it, or
finds them where its own configuration says. A version that cannot be had here in time is told as NOT TESTED. Exit
status 1 when a test fails.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from . import suite
from .environment import Environment, interpreter
from .fetching import Unavailable

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
TESTS = ("tests/unit/core", "tests/unit/comfyui_adapter", "tests/unit/integrations")
# An environment takes some 6 GB, and pip keeps what it fetches, packed, beside it until the end.
NEEDED_BYTES = 12 << 30


def versions() -> list[str]:
    """Those that there are requirements for."""
    return sorted(path.stem.removeprefix("torch-") for path in REQUIREMENTS.glob("torch-*.txt"))


def make_environment(folder: Path, requirements: Path, seconds: float) -> None:
    """Make the environment `folder` unless it is there. Unavailable when it cannot be made here in time."""
    if Environment(folder, requirements.read_text(encoding="utf-8")).is_current:
        return
    if seconds <= 0.0:
        raise Unavailable("no time was left to make its environment; --minutes gives more")
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        raise Unavailable(f"{free / 1e9:.0f} GB of disk are free, {NEEDED_BYTES / 1e9:.0f} are needed")
    suite.make_environment(folder, requirements, seconds)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="+", choices=versions(), metavar="VERSION", help=f"of {', '.join(versions())}"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for making all environments together, default 30")
    arguments = parser.parse_args()
    left, failed = arguments.minutes * 60.0, False
    for version in arguments.versions:
        name = f"torch-{version}"
        folder = ROOT / f".venv-{name}"
        started = time.monotonic()
        try:
            make_environment(folder, REQUIREMENTS / f"{name}.txt", left)
        except Unavailable as error:
            suite.not_tested(name, error)
            continue
        finally:
            left -= time.monotonic() - started
        failed |= suite.run(name, interpreter(folder), "-n", "2", "--dist", "loadfile", *TESTS) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
