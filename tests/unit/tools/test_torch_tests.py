"""`make torch-tests`: a version that cannot be had is told, and only a test that fails fails."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tools import suite, torch_tests
from tools.environment import Environment
from tools.fetching import Unavailable

pytestmark = pytest.mark.usefixtures("records")


def run(monkeypatch: pytest.MonkeyPatch, problems: dict[str, str], failing: str = "") -> tuple[int, list[str]]:
    """The command's exit status, and the suites that were run."""
    ran = []

    def make(folder: Path, requirements: Path, seconds: float) -> None:
        if requirements.stem in problems:
            raise Unavailable(problems[requirements.stem])

    def test(name: str, python: Path, *arguments: str) -> int:
        assert f".venv-{name}" in python.parts
        ran.append(name)
        return int(name == failing)

    monkeypatch.setattr(torch_tests, "make_environment", make)
    monkeypatch.setattr(suite, "run", test)
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


def test_a_version_without_requirements_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torch_tests", "9.9"])
    with pytest.raises(SystemExit, match="2"):
        torch_tests.main()
    assert "'9.9' (choose from " in capsys.readouterr().err


def test_an_environment_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", None)  # nothing is asked of the disk
    monkeypatch.setattr(Environment, "is_current", True)
    torch_tests.make_environment(tmp_path / "venv", torch_tests.REQUIREMENTS / "torch-2.6.txt", 0.0)
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("needed", "seconds", "reason"), [(1 << 62, 60.0, "GB of disk are free"), (0, 0.0, "no time was left")]
)
def test_a_full_disk_and_no_time_are_reasons(
    needed: int, seconds: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_tests, "NEEDED_BYTES", needed)
    with pytest.raises(Unavailable, match=reason):
        torch_tests.make_environment(tmp_path / "venv", torch_tests.REQUIREMENTS / "torch-2.6.txt", seconds)
    assert not (tmp_path / "venv").exists()


def test_only_the_making_of_environments_takes_from_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Clock:
        now = 0.0

    def make(folder: Path, requirements: Path, seconds: float) -> None:
        given.append(seconds)
        Clock.now += 60.0
        if requirements.stem == "torch-2.6":
            raise Unavailable("no network")

    def test(name: str, python: Path, *arguments: str) -> int:
        Clock.now += 6000.0
        return 0

    monkeypatch.setattr("tools.torch_tests.time.monotonic", lambda: Clock.now)
    monkeypatch.setattr(torch_tests, "make_environment", make)
    monkeypatch.setattr(suite, "run", test)
    monkeypatch.setattr(sys, "argv", ["torch_tests", "--minutes", "10", "2.6", "2.8", "newest"])
    assert torch_tests.main() == 0 and given == [600.0, 540.0, 480.0]
