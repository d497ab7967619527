"""Run tests with a mistake in a copy of the repository, in a process that has torch already."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from .mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
# What no test reads a changed line of, and what is too large to copy.
_NOT_COPIED = shutil.ignore_patterns(".*", "build", "demo-output", "__pycache__", "wheels")


class _Failed:
    """A plugin that writes down the first test that fails, as this process may end before pytest says it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid, encoding="utf-8")


@dataclass
class Copy:
    """A copy of the repository, for one trial at a time."""

    folder: Path

    @classmethod
    def make(cls, parent: Path) -> Copy:
        """A new one in `parent`; it has the wheels by a link."""
        folder = Path(tempfile.mkdtemp(prefix="copy-", dir=parent)) / "comfy-sage2"
        shutil.copytree(ROOT, folder, ignore=_NOT_COPIED)
        (folder / "wheels").symlink_to(ROOT / "wheels")
        return cls(folder)


@dataclass
class Trial:
    """Tests that run. Made by `start`; in_check: `make check` runs them too."""

    copy: Copy
    mutant: Mutant | None
    process: int
    scratch: Path
    end: float
    in_check: bool

    @classmethod
    def start(cls, copy: Copy, mutant: Mutant | None, tests: Sequence[str], seconds: float, *, in_check: bool) -> Trial:
        """Run these tests until one fails, at most so many seconds. Without a mutant the copy is as the repository."""
        if mutant is not None:
            source = (ROOT / mutant.path).read_text(encoding="utf-8")
            (copy.folder / mutant.path).write_text(mutant.apply(source), encoding="utf-8")
        scratch = Path(tempfile.mkdtemp(prefix="trial-", dir=copy.folder.parent))
        process = os.fork()
        if process == 0:
            _child(copy.folder, tests, scratch)
        return cls(copy, mutant, process, scratch, time.monotonic() + seconds, in_check)

    def killer(self) -> str | None:
        """The test that failed, or what else ended the run; "" when all passed; None while they run."""
        process, status = os.waitpid(self.process, os.WNOHANG)
        if process == 0:
            if time.monotonic() < self.end:
                return None
            os.killpg(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            found = "time"
        elif os.WIFEXITED(status) and os.WEXITSTATUS(status) in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            found = ""
        else:
            failed = self.scratch / "failed"
            found = failed.read_text(encoding="utf-8") if failed.exists() else "import"
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.mutant is not None:
            shutil.copyfile(ROOT / self.mutant.path, self.copy.folder / self.mutant.path)
        return found


def _child(folder: Path, tests: Sequence[str], scratch: Path) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        output = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(output, stream)
        # What a mistake of paths writes or deletes lies in the trial's folder.
        os.environ |= {"HOME": str(scratch), "XDG_CACHE_HOME": str(scratch / "cache"), "TMPDIR": str(scratch)}
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        tempfile.tempdir = None
        sys.dont_write_bytecode = True
        arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={scratch / 'tests'}", *tests]
        status = pytest.main(arguments, plugins=[_Failed(scratch / "failed")])
    finally:
        os._exit(int(status))
