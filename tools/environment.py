"""Create a virtual environment for the project's own commands.

    python -m tools.environment --venv .venv --requirements FILE

Running it again is quick: a stamp in the environment records what it holds and the Python that it was made with. It
needs nothing but the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from .fetching import Unavailable, seconds_left
from .progress import Activity, run_showing

OLDEST_PYTHON = (3, 10)
STAMP = "environment.sha256"
UNFINISHED = "environment.unfinished"  # is there while pip works: what a killed pip leaves looks installed
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")

# Of a file that cannot be replaced since it runs. On Windows missing rights look the same.
_IN_USE = errno.EACCES if os.name == "nt" else errno.ETXTBSY
_IF_IN_USE = "If it is in use, end what runs in it, such as ComfyUI or tests, and run this again"


def interpreter(folder: Path) -> Path:
    """The Python inside the environment at `folder`."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _fingerprint(contents: str) -> str:
    return hashlib.sha256(f"{sys.version}\n{contents}".encode()).hexdigest()


class Environment:
    """A virtual environment, and what it has to hold.

    contents: changes when the environment has to be brought up to date. covers: other contents that are part of these.
    """

    def __init__(self, folder: Path, contents: str, covers: Sequence[str] = ()) -> None:
        self.folder = folder
        self.python = interpreter(folder)
        self._fingerprint, *self._covered = map(_fingerprint, (contents, *covers))

    @property
    def is_current(self) -> bool:
        """Whether the environment was completed for exactly these contents, and its Python is still there."""
        stamp = self.folder / STAMP
        if not stamp.is_file() or (self.folder / UNFINISHED).exists() or not self.python.exists():
            return False
        return self._fingerprint in stamp.read_text(encoding="utf-8").split()

    @property
    def _can_go_on(self) -> bool:
        """Whether pip can go on in the environment that there is; a half-made or another Python's is made anew."""
        settings = self.folder / "pyvenv.cfg"
        # Without a stamp it was never complete, and may lack pip.
        if not all(path.is_file() for path in (settings, self.folder / STAMP)) or (self.folder / UNFINISHED).exists():
            return False
        return f"version = {platform.python_version()}\n" in settings.read_text(encoding="utf-8")

    def make(
        self,
        title: str,
        *steps: Sequence[str],
        settle: Callable[[], None] = lambda: None,
        seconds: float | None = None,
    ) -> None:
        """Install unless that is done: each of `steps` is the arguments of one `pip install`.

        settle: what has to be done after pip. seconds: the longest that it may take. Unavailable when this Python
        cannot make environments, the disk is full, pip fails, or there is no time left.
        """
        if self.is_current:
            return
        _check_python()
        end = None if seconds is None else time.monotonic() + seconds
        try:
            with Activity(title) as activity:
                activity("creating the environment")
                if not self._can_go_on or not self.python.exists():  # else its Python may be running: it stays
                    venv.EnvBuilder(with_pip=True, clear=not self._can_go_on).create(self.folder)
                (self.folder / UNFINISHED).touch()
                for step in steps:
                    self._pip(step, activity, None if end is None else max(end - time.monotonic(), 0.0))
                settle()
            (self.folder / STAMP).write_text("\n".join((self._fingerprint, *self._covered)), encoding="utf-8")
            (self.folder / UNFINISHED).unlink()
        except OSError as error:
            hint = f". {_IF_IN_USE}" if error.errno == _IN_USE else ""
            raise Unavailable(f"{self.folder} cannot be made: {error}{hint}") from error
        except subprocess.SubprocessError as error:
            raise Unavailable(f"{self.folder} cannot be made: {error}") from error

    def _pip(self, arguments: Sequence[str], activity: Activity, seconds: float | None) -> None:
        """Run pip, showing its latest line; when it fails all its lines, and Unavailable."""
        command = [str(self.python), *PIP, *arguments]
        try:
            status, lines = run_showing(command, lambda line: activity(_now(line)), seconds=seconds_left(seconds))
        except TimeoutError:
            raise Unavailable(f"{self.folder} was not made in time") from None
        if status == 0:
            return
        if (self.folder / STAMP).exists():
            # It was complete for other contents, and is again what it was.
            (self.folder / UNFINISHED).unlink()
        sys.stderr.write("\n" + "".join(lines))
        raise Unavailable(f"pip failed with exit status {status}: {' '.join(command)}")


def _now(line: str) -> str:
    """What pip does, by its latest line: that of the old setuptools stands there while gigabytes are unpacked."""
    return "unpacking packages" if re.search("uninstall|existing installation", line, re.IGNORECASE) else line


def _check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise Unavailable(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}; run make with PYTHON=…")
    if importlib.util.find_spec("ensurepip") is None:
        raise Unavailable(
            f"{sys.executable} cannot make virtual environments (no ensurepip): install python3-venv, "
            "or run make with PYTHON=… naming another Python"
        )


def existing_file(text: str) -> Path:
    """A type of argument: a file to read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file, and there is none at {text!r}")
    return Path(text)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--requirements", type=existing_file, required=True, help="requirements file to install")
    arguments = parser.parse_args()
    requirements: Path = arguments.requirements
    environment = Environment(arguments.venv, requirements.read_text(encoding="utf-8"))
    environment.make(f"installing {arguments.venv}", ("--requirement", str(requirements)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
