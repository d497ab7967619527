"""`make torch-tests`: a version that cannot be had is told, and only a test that fails fails."""

from __future__ import annotations

import json
import os
import shutil
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import environment, test_summary, torch_tests

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements"


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(test_summary, "FOLDER", tmp_path / "records")
    return tmp_path / "records"


def run(monkeypatch: pytest.MonkeyPatch, problems: dict[str, str], failing: str = "") -> tuple[int, list[str]]:
    """The command's exit status, and the suites that were run."""
    ran = []

    def test(folder: Path, suite: str) -> int:
        assert folder.name == f".venv-{suite}"
        ran.append(suite)
        return int(suite == failing)

    monkeypatch.setattr(
        torch_tests, "problem_of", lambda folder, requirements, seconds: problems.get(requirements.stem)
    )
    monkeypatch.setattr(torch_tests, "test", test)
    monkeypatch.setattr(sys, "argv", ["torch_tests", "2.6", "2.8", "newest"])
    return torch_tests.main(), ran


def test_what_cannot_be_had_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], records: Path
) -> None:
    assert run(monkeypatch, {"torch-2.8": "no network"}) == (0, ["torch-2.6", "torch-newest"])
    assert "*** NOT TESTED: TORCH-2.8: no network ***" in capsys.readouterr().out
    assert json.loads((records / "torch-2.8.json").read_text(encoding="utf-8"))["counts"]["failed"] == 0


def test_a_failing_test_fails_after_all_versions_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, {}, failing="torch-2.6") == (1, ["torch-2.6", "torch-2.8", "torch-newest"])


def test_an_environment_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = REQUIREMENTS / "torch-2.6.txt"
    made = environment.Environment(tmp_path / "venv", requirements.read_text(encoding="utf-8"))
    monkeypatch.setattr(shutil, "disk_usage", None)  # nothing is asked of the disk
    monkeypatch.setattr(venv, "EnvBuilder", lambda **_: SimpleNamespace(create=Path.mkdir))
    made.make("test")
    assert torch_tests.problem_of(made.folder, requirements, 0.0) is None


def test_a_full_disk_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_tests, "NEEDED_BYTES", 1 << 62)
    problem = torch_tests.problem_of(tmp_path / "venv", REQUIREMENTS / "torch-2.6.txt", 1.0)
    assert problem is not None and "of disk are free" in problem
    assert not (tmp_path / "venv").exists()


def test_pip_that_fails_or_takes_too_long_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    monkeypatch.setattr(torch_tests, "ROOT", tmp_path)
    monkeypatch.setattr(torch_tests, "NEEDED_BYTES", 0)
    command = tmp_path / "tools" / "environment.py"
    command.write_text("raise SystemExit('no network')")
    problem = torch_tests.problem_of(tmp_path / "venv", REQUIREMENTS / "torch-2.8.txt", 60.0)
    assert problem == "torch-2.8.txt cannot be installed, see above"
    # Its child goes with it: nothing of pip stays behind. The end of the last writer is the end of what is read.
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    child = "file = open('alive', 'w'); import time; time.sleep(600)"
    command.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n")
    problem = torch_tests.problem_of(tmp_path / "venv", REQUIREMENTS / "torch-2.8.txt", 2.0)
    assert problem is not None and "not made in time" in problem
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)
