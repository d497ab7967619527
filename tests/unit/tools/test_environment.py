"""Environments that cannot be made, or were only half made."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from tools import environment
from tools.comfyui import environment as host
from tools.comfyui import suite as host_suite
from tools.environment import Environment
from tools.fetching import UNTIL, Unavailable
from tools.progress import run_showing

# In the place of pip, by the requirement that it is given.
PIPS = {
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
        return run_showing([sys.executable, "-c", PIPS[command[-1]]], *args, **options)

    monkeypatch.setattr("tools.environment.run_showing", pip)
    return cleared


def test_a_complete_one_is_left_alone(tmp_path: Path, made: list[bool]) -> None:
    for _ in range(2):
        Environment(tmp_path / "venv", "a").make("test", ["works"])
    assert made == [True] and Environment(tmp_path / "venv", "a").is_current
    Environment(tmp_path / "venv", "b").make("test", ["works"])
    assert made == [True], "pip goes on in the one that there is"


def test_one_that_covers_other_contents_is_not_made_for_them(tmp_path: Path, made: list[bool]) -> None:
    Environment(tmp_path / "venv", "a").make("test", ["works"])
    Environment(tmp_path / "venv", "a and b", covers=["a"]).make("test", ["works"])
    for contents in ("a", "a and b"):
        Environment(tmp_path / "venv", contents).make("test", ["fails"])
    Environment(tmp_path / "venv", "c").make("test", ["works"])
    assert not Environment(tmp_path / "venv", "a").is_current and not Environment(tmp_path / "venv", "b").is_current


def test_the_packs_of_a_folder_are_added_and_do_no_harm_to_who_asks_for_none(
    tmp_path: Path, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    comfyui, pack = tmp_path / "ComfyUI", tmp_path / "packs" / "ComfyUI-Other"
    for folder, requirements in ((comfyui, "torch\nnumpy>=1.25"), (pack, "numpy\nopencv-python")):
        folder.mkdir(parents=True)
        (folder / "requirements.txt").write_text(requirements)
    (comfyui / "comfyui_version.py").write_text('__version__ = "0.33.0"')
    asked: list[list[str]] = []

    def pip(command: list[str], *args: Any, **options: Any) -> tuple[int, list[str]]:
        listed = command[command.index("--requirement") + 1] if "--requirement" in command else ""
        asked.append(Path(listed).read_text().split() if listed else [])
        return 0, []

    monkeypatch.setattr("tools.environment.run_showing", pip)
    monkeypatch.setattr(host, "adapt", lambda python: None)
    venv = tmp_path / "venv"
    for packs in (None, pack.parent, None, pack.parent, None):
        host.make_environment(venv, [comfyui], packs)
    assert len(asked) == 4, "twice, in two steps each"
    assert "numpy>=1.25" in asked[1] and "opencv-python" not in asked[1]
    assert "numpy>=1.25" in asked[3] and "opencv-python" in asked[3]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows changes no file of a program that runs")
def test_one_that_is_in_use_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real environment, whose Python runs meanwhile."""
    monkeypatch.setattr("tools.environment.PIP", ("-c", "pass"))
    Environment(tmp_path / "venv", "a").make("test", [])
    python = environment.interpreter(tmp_path / "venv")
    user = subprocess.Popen([python, "-c", "print('runs', flush=True); input()"], stdin=PIPE, stdout=PIPE)
    try:
        assert user.stdout is not None and user.stdout.readline()
        Environment(tmp_path / "venv", "b").make("test", [])
    finally:
        user.communicate(b"\n")
    assert user.returncode == 0 and Environment(tmp_path / "venv", "b").is_current


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(
            OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY), os.path.join("bin", "python")),
            r"bin/python'\. If it is in use, end what runs in it, .* run this again$",
            marks=pytest.mark.skipif(sys.platform == "win32", reason="Windows has another number for it"),
            id="in use",
        ),
        pytest.param(
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "venv cannot be made: .*No space left", id="a full disk"
        ),
    ],
)
def test_one_that_cannot_be_created_is_one_line(
    error: OSError, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Builder:
        def __init__(self, **options: object) -> None:
            pass

        def create(self, folder: Path) -> None:
            raise error

    monkeypatch.setattr(venv, "EnvBuilder", Builder)
    with pytest.raises(Unavailable, match=message):
        Environment(tmp_path / "venv", "a").make("test", ["works"])


def test_without_its_python_it_is_made_again(tmp_path: Path, made: list[bool]) -> None:
    complete = Environment(tmp_path / "venv", "a")
    complete.make("test", ["works"])
    complete.python.unlink()
    assert not complete.is_current
    complete.make("test", ["works"])
    assert complete.is_current and made == [True, False]


def test_what_is_shown_is_what_pip_does(
    tmp_path: Path, made: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip's last line is of the old setuptools, for minutes in which it unpacks torch."""
    monkeypatch.setitem(PIPS, "unpacks", "print('Collecting torch'); print('Successfully uninstalled setuptools-1')")
    monkeypatch.setattr("tools.progress._LINE_EVERY", 0.0)
    Environment(tmp_path / "venv", "a").make("test", ["unpacks"])
    shown = capsys.readouterr().out
    assert "Collecting torch" in shown and "unpacking packages" in shown and "uninstalled" not in shown


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
    assert made == [True, True]


def test_one_whose_making_was_killed_is_made_from_the_beginning(tmp_path: Path, made: list[bool]) -> None:
    """It has no pip yet."""
    venv.EnvBuilder(with_pip=True, clear=False).create(tmp_path / "venv")
    Environment(tmp_path / "venv", "a").make("test", ["works"])
    assert made == [False, True]


def test_after_the_time_for_fetching_nothing_is_fetched(
    tmp_path: Path, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNTIL, "1")
    with pytest.raises(Unavailable, match="not made in time"):
        Environment(tmp_path / "venv", "a").make("test", ["hangs"])
    monkeypatch.setenv(UNTIL, "tomorrow")
    with pytest.raises(SystemExit, match="must be seconds since the epoch, got 'tomorrow'"):
        Environment(tmp_path / "venv", "a").make("test", ["works"])


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (environment.main, ["--venv", "a", "--requirements", "nowhere.txt"], "expected a file, and there is none at"),
        (host.main, ["--venv", "a", "--comfyui", "b", "--packs", "nowhere"], "expected a folder that holds ComfyUI's"),
        (
            host.main,
            ["--venv", "a", "--packs", "nowhere"],
            "expected a folder with clones of node packs, got 'nowhere'",
        ),
        (host_suite.main, ["--venv", "a", "--host-venv", "b", "--packs", "."], "with clones of node packs, got '.'"),
    ],
)
def test_what_is_not_there_is_refused(
    main: Callable[[], int],
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and words in capsys.readouterr().err
