"""`make windows-tests` and `make arm-tests`: what cannot be had is told and is no failure, a failing test is one."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools import suite as suites
from tools.fetching import Unavailable
from tools.platforms import arm_python, debian, suite, windows_python
from tools.platforms.foreign_python import ForeignPython


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
    def make(folder: Path, requirements: Path) -> None:
        raise Unavailable(f"{requirements.name}: no network")

    monkeypatch.setattr(windows_python, "missing_tools", list)
    monkeypatch.setattr(suites, "make_environment", make)
    assert suite.run_in_environment("windows", tmp_path) == 0
    assert "*** NOT TESTED: WINDOWS: platforms.txt: no network ***" in capsys.readouterr().out
    assert not commands


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("Debian's CPython 3.13 for arm64 cannot be fetched: no route to host"),
        OSError(28, "No space left on device"),
        subprocess.TimeoutExpired(["wineboot"], 900),
        zipfile.BadZipFile("File is not a zip file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_interpreters_that_cannot_be_put_together_are_told(
    error: BaseException,
    records: Path,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prepare() -> None:
        raise error

    monkeypatch.setattr(arm_python, "prepare", prepare)
    assert suite.run("arm") == 0
    assert f"*** NOT TESTED: ARM: {error} ***" in capsys.readouterr().out
    assert not commands and (records / "arm.json").exists()


def test_a_download_that_was_stopped_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(what: str, command: list[str]) -> str:
        folder = Path(command[command.index("--dest") + 1])
        assert not folder.exists()
        folder.mkdir(parents=True)
        (folder / "panda3d.whl").write_bytes(b"half" if not attempts else b"whole")
        attempts.append(folder)
        if len(attempts) == 1:
            raise Unavailable("the power is gone")
        return ""

    attempts: list[Path] = []
    monkeypatch.setattr(windows_python, "fetch", download)
    with pytest.raises(Unavailable):
        windows_python._carrier("3.12", tmp_path)
    for _ in range(2):
        assert windows_python._carrier("3.12", tmp_path).read_bytes() == b"whole"
    assert len(attempts) == 2


@pytest.mark.parametrize("program", ["true", "false", "no-such-program"])
def test_wine_gets_fixed_addresses_where_they_are_permitted(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(windows_python, "FIXED_ADDRESSES", (program,))
    command = windows_python.wine_command.__wrapped__()
    assert command == (("true", "wine") if program == "true" else ("wine",))


def test_an_installation_that_was_stopped_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "windows-3.12" / "Lib" / "site-packages"
    (site / "torch").mkdir(parents=True)
    requirements = tmp_path / "windows.txt"
    requirements.write_text("torch==2\n")
    seen: list[list[Path]] = []

    def installing(what: str, command: list[str]) -> str:
        seen.append(list(site.iterdir()))
        return ""

    monkeypatch.setattr(windows_python, "fetch", installing)
    python = ForeignPython(windows_python.PLATFORM, "3.12", ("wine",))
    for _ in range(2):
        windows_python.install(python, requirements, tmp_path)
    assert seen == [[]]


def test_a_failing_test_is_a_failure(
    records: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arm_python, "prepare", lambda: None)
    assert suite.run("arm") == 3
    assert "pytest" in commands[0] and commands[0][-2:] == ["-k", "arm"]
    assert "NOT TESTED" not in capsys.readouterr().out


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
