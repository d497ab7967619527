"""A suite in an environment of its own: what cannot be had is told, a failing test fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import suite, test_summary
from tools.comfyui import suite as comfyui_suite
from tools.environment import Environment
from tools.fetching import Unavailable


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(test_summary, "FOLDER", tmp_path / "records")
    return tmp_path / "records"


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


@pytest.mark.parametrize("is_offline", [False, True])
def test_only_a_failing_test_fails(
    is_offline: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Environment, "make", offline if is_offline else lambda *args, **options: None)
    command = ["suite", "modalities", "--venv", "venv", "--requirements", str(suite.ROOT / "requirements" / "test.txt")]
    monkeypatch.setattr(sys, "argv", [*command, "tests/modalities"])
    assert suite.main() == (0 if is_offline else 1)
    assert ran == ([] if is_offline else ["modalities"])
    assert ("*** NOT TESTED: MODALITIES: no network ***" in capsys.readouterr().out) == is_offline


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
