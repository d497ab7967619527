"""`python -m comfy_sage2`: which commands it offers and how it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from comfy_sage2 import __main__ as command_line
from lab import __main__ as laboratory
from lab.arguments import shown

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("program", "main", "command"),
    [
        ("comfy_sage2", command_line.main, "doctor"),
        *(("lab", laboratory.main, command) for command in laboratory.COMMANDS),
    ],
)
def test_help_of_a_command(
    program: str, main: Callable[[list[str]], int], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as finished:
        main([command, "--help"])
    assert finished.value.code == 0
    assert f"python -m {program} {command}" in capsys.readouterr().out


def refused(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line that a command prints for wrong arguments."""
    with pytest.raises(SystemExit) as finished:
        main(arguments)
    assert finished.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["dance"], "'dance'"), (["doctor", "--fast"], "unrecognized arguments: --fast"), (["doctor", "more"], "more")],
)
def test_wrong_arguments_of_the_library(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(command_line.main, arguments, capsys)
    assert line.startswith("python -m comfy_sage2") and words in line, line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--shapes", "wan"], "--shapes: shape must be one of paper"),
        (["bench", "--seconds", "0"], "--seconds: expected a number above 0, got '0'"),
        (["bench", "--build", "after"], "--build: expected NAME=FOLDER, got 'after'"),
        (["bench", "--fast"], "unrecognized arguments: --fast"),
        (["demo", "--comfyui", "nowhere"], "--comfyui: expected a folder that holds ComfyUI's main.py, got 'nowhere'"),
        (["demo", "--output", "README.md/results"], "--output: cannot make the folder 'README.md/results': "),
        (["videos", "--captions", "0"], "--captions: expected a whole number of at least 1, got '0'"),
        (["videos", "--rows", "8b", "9b"], "--rows: no row has '9b' in its name, only full precision, auto, 8b"),
        (["accuracy", "--device", "toaster"], "--device: torch cannot use 'toaster' here"),
        (["families", "--comfyui", "nowhere"], "--comfyui: expected a folder"),
        (["families", "--modes", "9b"], "--modes: [SA-"),
        (["families", "--only", "nobody"], "no family has 'nobody' in its name: MiniMax H3"),
    ],
)
def test_wrong_arguments_of_the_laboratory(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    line = refused(laboratory.main, arguments, capsys)
    assert line.startswith(f"python -m lab {arguments[0]}: ") and words in line, line


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import comfy_sage2
from comfy_sage2 import __main__ as command_line
from lab import __main__ as laboratory
from comfy_sage2.kernels import bundled
print(*bundled.architectures())
try:
    comfy_sage2.attention
except ModuleNotFoundError as error:
    print(error)
sys.exit(command_line.main(["doctor"]))
"""


def test_without_torch_the_package_imports_and_the_doctor_says_so() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    architectures, attention = finished.stdout.splitlines()
    assert "sm89" in architectures
    assert attention == "comfy_sage2.attention needs torch, which this Python does not have"
    assert "doctor needs torch" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_ctrl_c_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lab.evaluation.accuracy.main", interrupted)
    assert laboratory.main(["accuracy"]) == 130
    assert capsys.readouterr().err == "accuracy: interrupted\n"


def test_a_full_disk_changes_neither_status_nor_errors() -> None:
    code = """
import sys
sys.modules["torch"] = None  # for a faster start
from comfy_sage2.command_line import say
say("text")
say("more")
raise SystemExit(3)
"""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment)
    assert (run.returncode, run.stderr) == (3, "")


def test_a_page_does_not_say_where_a_build_lies() -> None:
    given = ["--rows", "8b", "--build", "a=/x/y=z", "--build=b=/x", "--seconds=5"]
    assert shown(given) == ["--rows", "8b", "--build", "a=FOLDER", "--build=b=FOLDER", "--seconds=5"]
