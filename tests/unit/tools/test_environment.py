"""Environments that cannot be made, or were only half made."""

from __future__ import annotations

import os
import platform
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tools import environment
from tools.environment import Environment
from tools.fetching import UNTIL, Unavailable
from tools.progress import run_showing

# In the place of pip, by the requirement that it is given.
PIP = {
    "works": "import sys; sys.exit(0)",
    "fails": "import sys; print('no network'); sys.exit(3)",
    "hangs": "import time; time.sleep(600)",
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each environment that was made began empty. Nothing is installed in them."""
    cleared: list[bool] = []

    class Builder:
        def __init__(self, with_pip: bool, clear: bool) -> None:
            cleared.append(clear)

        def create(self, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            (folder / "pyvenv.cfg").write_text(f"version = {platform.python_version()}\n")
            python = environment.interpreter(folder)
            python.parent.mkdir(exist_ok=True)
            python.touch()

    monkeypatch.setattr(venv, "EnvBuilder", Builder)

    def pip(command: list[str], *args: Any, **options: Any) -> tuple[int, list[str]]:
        return run_showing([sys.executable, "-c", PIP[command[-1]]], *args, **options)

    monkeypatch.setattr("tools.environment.run_showing", pip)
    return cleared


def test_a_complete_one_is_left_alone(tmp_path: Path, made: list[bool]) -> None:
    for _ in range(2):
        Environment(tmp_path / "venv", "a").make("test", ["works"])
    assert made == [True] and Environment(tmp_path / "venv", "a").is_current
    Environment(tmp_path / "venv", "b").make("test", ["works"])
    assert made == [True, False]


def test_without_its_python_it_is_made_again(tmp_path: Path, made: list[bool]) -> None:
    complete = Environment(tmp_path / "venv", "a")
    complete.make("test", ["works"])
    complete.python.unlink()
    assert not complete.is_current


@pytest.mark.parametrize(("pip", "reason"), [("fails", "exit status 3"), ("hangs", "not made in time")])
def test_a_half_made_one_is_made_from_the_beginning(
    pip: str, reason: str, tmp_path: Path, made: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unavailable, match=reason):
        Environment(tmp_path / "venv", "a").make("test", ["works"], [pip], seconds=2.0 if pip == "hangs" else None)
    assert not Environment(tmp_path / "venv", "a").is_current
    assert ("no network" in capsys.readouterr().err) == (pip == "fails")
    Environment(tmp_path / "venv", "a").make("test", ["works"])
    assert made == [True, True] and Environment(tmp_path / "venv", "a").is_current


def test_a_failed_update_leaves_what_was_there(tmp_path: Path, made: list[bool]) -> None:
    """Without a network nobody should lose the environment that works."""
    Environment(tmp_path / "venv", "a").make("test", ["works"])
    with pytest.raises(Unavailable):
        Environment(tmp_path / "venv", "b").make("test", ["fails"])
    assert Environment(tmp_path / "venv", "a").is_current and not Environment(tmp_path / "venv", "b").is_current


def test_a_killed_update_is_made_from_the_beginning(tmp_path: Path, made: list[bool]) -> None:
    Environment(tmp_path / "venv", "a").make("test", ["works"])
    with pytest.raises(Unavailable):
        Environment(tmp_path / "venv", "b").make("test", ["hangs"], seconds=0.5)
    assert not Environment(tmp_path / "venv", "a").is_current
    Environment(tmp_path / "venv", "a").make("test", ["works"])
    assert made == [True, False, True]


def test_after_the_time_for_fetching_nothing_is_fetched(
    tmp_path: Path, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNTIL, "1")
    with pytest.raises(Unavailable, match="not made in time"):
        Environment(tmp_path / "venv", "a").make("test", ["hangs"])
    monkeypatch.setenv(UNTIL, "tomorrow")
    with pytest.raises(SystemExit, match="must be seconds since the epoch, got 'tomorrow'"):
        Environment(tmp_path / "venv", "a").make("test", ["works"])


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        def __init__(self, **options: object) -> None:
            pass

        def create(self, folder: Path) -> None:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(venv, "EnvBuilder", Builder)
    with pytest.raises(Unavailable, match=r"venv cannot be made: .*No space left"):
        Environment(tmp_path / "venv", "a").make("test", ["works"])
