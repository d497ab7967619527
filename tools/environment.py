"""Create a virtual environment for the project's own commands.

usage: python -m tools.environment --venv .venv --requirements FILE

Running it again is quick: a stamp in the environment records the requirements and the Python that it was made for.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

OLDEST_PYTHON = (3, 10)
STAMP = "requirements.sha256"


def interpreter(environment: Path) -> Path:
    """The Python inside `environment`."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fingerprint(requirements: Path) -> str:
    """Changes when the environment has to be made anew."""
    return hashlib.sha256(f"{sys.version}\n".encode() + requirements.read_bytes()).hexdigest()


def build(environment: Path, requirements: Path) -> None:
    """Create `environment` and install into it; raises CalledProcessError when pip fails."""
    venv.EnvBuilder(with_pip=True, clear=True).create(environment)
    command = [str(interpreter(environment)), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*command, "--requirement", str(requirements)], check=True, stdin=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--requirements", type=Path, required=True, help="requirements file to install")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        raise SystemExit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}; run make with PYTHON=…")
    if importlib.util.find_spec("ensurepip") is None:
        raise SystemExit(
            f"{sys.executable} cannot make virtual environments (no ensurepip): install python3-venv, "
            "or run make with PYTHON=… naming another Python"
        )
    wanted = fingerprint(arguments.requirements)
    stamp = arguments.venv / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"installing {arguments.requirements} into {arguments.venv} (minutes, once)", flush=True)
    build(arguments.venv, arguments.requirements)
    stamp.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
