"""`make windows-tests` and `make arm-tests`: what cannot be had is told and is no failure, a failing test is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import test_summary
from tools.platforms import arm_python, debian, suite, windows_python
from tools.platforms.fetching import Unavailable, fetch


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(test_summary, "FOLDER", tmp_path / "records")
    return tmp_path / "records"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the suite runs; each of them fails."""
    seen: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


@pytest.mark.parametrize(("system", "module"), [("windows", windows_python), ("arm", arm_python)])
def test_a_missing_program_is_told(
    system: str, module: Any, records: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert suite.run_in_environment(system, tmp_path) == 0
    assert capsys.readouterr().out.startswith(f"*** NOT TESTED: {system.upper()}: ")
    assert not commands
    record = json.loads((records / f"{system}.json").read_text())
    assert sum(record["counts"].values()) == 0 and list(record["skipped_as_a_whole"]) == [system]


def test_packages_that_cannot_be_installed_are_told(
    records: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(windows_python, "missing_tools", list)
    assert suite.run_in_environment("windows", tmp_path) == 0
    assert "*** NOT TESTED: WINDOWS: platforms.txt cannot be installed" in capsys.readouterr().out
    assert len(commands) == 1 and "tools.environment" in commands[0]


def test_a_download_that_fails_is_told(
    records: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare() -> None:
        raise Unavailable("Debian's CPython 3.13 for arm64 cannot be fetched: no route to host")

    monkeypatch.setattr(arm_python, "prepare", prepare)
    assert suite.run("arm") == 0
    assert "*** NOT TESTED: ARM: Debian's CPython 3.13 for arm64" in capsys.readouterr().out
    assert not commands and (records / "arm.json").exists()


def test_a_failing_test_is_a_failure(
    records: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arm_python, "prepare", lambda: None)
    assert suite.run("arm") == 3
    assert "pytest" in commands[0] and commands[0][-2:] == ["-k", "arm"]
    assert "NOT TESTED" not in capsys.readouterr().out


def test_a_failed_fetch_names_what_and_why() -> None:
    code = "import sys; print('hello'); sys.stderr.write('first\\nthe index is down\\n'); sys.exit(4)"
    with pytest.raises(Unavailable, match=r"^the wheel cannot be fetched: the index is down$"):
        fetch("the wheel", [sys.executable, "-c", code])
    with pytest.raises(Unavailable, match=r"^the wheel cannot be fetched: .*no-such-program"):
        fetch("the wheel", ["no-such-program"])
    assert fetch("the wheel", [sys.executable, "-c", "print('here')"]) == "here\n"


def test_a_machine_without_a_debian_mirror_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(debian.MIRROR, raising=False)
    for answer, mirror in (("http://mirror.example.org/debian/\n", "http://mirror.example.org/debian/"), ("", None)):
        monkeypatch.setattr(debian, "fetch", lambda what, command, answer=answer: answer)
        if mirror is not None:
            assert debian._mirror() == mirror
        else:
            with pytest.raises(Unavailable, match="the variable DEBIAN_MIRROR can"):
                debian._mirror()
    monkeypatch.setenv(debian.MIRROR, "http://other.example.org/debian")
    assert debian._mirror() == "http://other.example.org/debian"
