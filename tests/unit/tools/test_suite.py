"""A suite in an environment of its own: what cannot be had is told, a failing test fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import suite
from tools.comfyui import clone, folders
from tools.comfyui import suite as comfyui_suite
from tools.environment import Environment
from tools.fetching import Unavailable

pytestmark = pytest.mark.usefixtures("records")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The suites that are run; each of them fails."""
    names: list[str] = []

    def run(name: str, python: Path, *arguments: str) -> int:
        names.append(name)
        return 1

    monkeypatch.setattr(suite, "run", run)
    return names


def offline(*args: object, **options: object) -> None:
    raise Unavailable("no network")


REQUIREMENTS = Path(__file__).parents[3] / "requirements" / "torch-2.6.txt"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_suite_without_its_environment_is_told_and_one_with_it_is_run(
    is_there: bool, ran: list[str], records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environment, "make", offline)
    monkeypatch.setattr(Environment, "is_current", is_there)
    options = ["--venv", str(tmp_path / "venv"), "--requirements", str(REQUIREMENTS), "--minutes", "1"]
    monkeypatch.setattr(sys, "argv", ["suite", "torch-2.6", *options, "--", "-n", "2", "tests/unit/core"])
    assert suite.main() == int(is_there), "a test that fails, fails"
    assert ran == ["torch-2.6"] * is_there
    if not is_there:
        record = json.loads((records / "torch-2.6.json").read_text(encoding="utf-8"))
        assert record["skipped_as_a_whole"] == {"torch-2.6": {"no network": 0}} and not record["counts"]["failed"]


@pytest.mark.parametrize(("gigabytes", "seconds", "reason"), [(1e9, 60.0, "GB of disk are free"), (0, 0.0, "no time")])
def test_a_full_disk_and_no_time_are_reasons(gigabytes: float, seconds: float, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=reason):
        suite.make_environment(tmp_path / "venv", REQUIREMENTS, seconds, gigabytes)
    assert not (tmp_path / "venv").exists()


def test_comfyuis_environment_that_cannot_be_made(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is told where the ComfyUI just lies here, and is an error where COMFYUI_PATH asks for it."""
    monkeypatch.delenv(comfyui_suite.HOST_PYTHON, raising=False)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(comfyui_suite, "comfyui_folders", lambda: [tmp_path])
    monkeypatch.setattr(comfyui_suite, "make_environment", offline)
    monkeypatch.setattr(sys, "argv", ["suite", "--venv", "venv", "--host-venv", "host"])
    assert comfyui_suite.main() == 0 and not ran
    assert (
        "*** NOT TESTED: COMFYUI: ComfyUI's requirements cannot be installed: no network ***" in capsys.readouterr().out
    )
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="no network"):
        comfyui_suite.main()
    monkeypatch.setenv(comfyui_suite.HOST_PYTHON, "python-of-the-host")
    assert comfyui_suite.main() == 1 and ran == ["comfyui"]


@pytest.fixture
def without_comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a ComfyUI; where the clone goes."""
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for module in (clone, folders):
        monkeypatch.setattr(module, "CLONE", tmp_path / "clone")
    monkeypatch.setattr(sys, "argv", ["suite", "--venv", "venv", "--host-venv", "host", "--clone"])
    return tmp_path / "clone"


def test_a_comfyui_that_cannot_be_cloned_is_told_in_one_line(
    ran: list[str], without_comfyui: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clone, "SOURCE", str(without_comfyui.parent / "nowhere"))
    assert comfyui_suite.main() == 0 and not ran and folders.comfyui_folders() == []
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("*** NOT TESTED: COMFYUI: no ComfyUI here, and it cannot be cloned (fatal: ")
    assert line.endswith("): name one that you have in COMFYUI_PATH ***")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_machine_without_comfyui_gets_the_pinned_release(
    ran: list[str], without_comfyui: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = without_comfyui.parent / "source"
    source.mkdir()
    (source / "main.py").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(source)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"], ["tag", folders.RELEASE]):
        subprocess.run([*git, *command], check=True)
    made: list[list[Path]] = []
    monkeypatch.delenv(comfyui_suite.HOST_PYTHON, raising=False)
    monkeypatch.setattr(comfyui_suite, "make_environment", lambda venv, roots, packs: made.append(roots))
    monkeypatch.setattr(clone, "SOURCE", str(source))
    assert comfyui_suite.main() == 1 and ran == ["comfyui"] and made == [[without_comfyui]]
    shutil.rmtree(source)  # another run takes the clone
    assert clone.cloned() == without_comfyui and folders.comfyui_folders() == [without_comfyui]
