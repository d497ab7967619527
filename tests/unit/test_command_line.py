"""`python -m comfy_sage2`: which commands it offers and how it fails."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from comfy_sage2 import __main__ as command_line
from comfy_sage2.command_line import existing_file, given_or_new_seed, output_file, output_folder
from lab import __main__ as laboratory

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_offered_command_has_a_main() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "comfy_sage2", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "doctor" in finished.stdout


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


def test_a_seed_that_is_not_given_is_another_one_in_every_run() -> None:
    assert given_or_new_seed(0) == 0 and given_or_new_seed(7) == 7
    assert len({given_or_new_seed(None) for _ in range(20)}) > 1
    assert all(0 <= given_or_new_seed(None) < 1 << 32 for _ in range(20))


def refused(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command answers wrong arguments with."""
    with pytest.raises(SystemExit) as finished:
        main(arguments)
    assert finished.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'dance'" in refused(command_line.main, ["dance"], capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--fast"], "unrecognized arguments: --fast"),
        (["doctor", "more"], "unrecognized arguments: more"),
    ],
)
def test_wrong_arguments_of_the_library(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(command_line.main, arguments, capsys)
    assert line.startswith(f"python -m comfy_sage2 {arguments[0]}: ") and words in line, line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--shapes", "wan"], "--shapes: shape must be one of paper"),
        (["bench", "--seconds", "0"], "--seconds: expected a number above 0, got '0'"),
        (["bench", "--json", "no/such/folder/a.json"], "--json: expected a file in a folder that exists"),
        (["bench", "--json", ""], "--json: expected a file in a folder that exists, got ''"),
        (["bench", "--results", ""], "--results: expected a folder, got ''; the current folder is '.'"),
        (["bench", "--seed", "-1"], "--seed: expected a whole number from 0 to 4294967295, got '-1'"),
        (["bench", "--fast"], "unrecognized arguments: --fast"),
        (["demo", "--comfyui", "nowhere"], "--comfyui: expected a folder that holds ComfyUI's main.py, got 'nowhere'"),
        (["demo", "--comfyui-python", "nowhere"], "--comfyui-python: expected a Python, and there is no file nowhere"),
        (
            ["demo", "--comfyui-python", "README.md"],
            "--comfyui-python: expected a Python, and README.md does not start",
        ),
        (["demo", "--output", ""], "--output: expected a folder, got ''"),
        (["demo", "--output", "README.md/results"], "--output: expected a folder, and a file is in the way"),
        (["demo", "more"], "unrecognized arguments: more"),
        (["eval", "--side", "100"], "--side: expected a multiple of 16, got 100"),
        (["eval", "--frames", "32"], "--frames: expected 1 more than a multiple of 4, got 32"),
        (["eval", "--steps", "0"], "--steps: expected a whole number of at least 1, got '0'"),
        (["eval", "--device", "toaster"], "--device: torch cannot use 'toaster' here"),
        (["eval", "--seed", str(1 << 64)], "--seed: expected a whole number from 0 to 4294967295"),
        (["eval", "--model", "nowhere"], "is missing; name the folder of the trained demo model"),
        (["eval", "--only", "demo", "--model", "nowhere"], "is missing; name the folder of the trained demo model"),
        (["eval", "--backend", "sm42"], "--backend: invalid choice: 'sm42'"),
        (
            ["eval", "--backend", "sm90", "--device", "cpu"],
            "--backend: sm90 cannot run here: [SA-103] the kernels need an NVIDIA GPU",
        ),
        (["steps", "--comfyui", "nowhere"], "--comfyui: expected a folder"),
    ],
)
def test_wrong_arguments_of_the_laboratory(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    line = refused(laboratory.main, arguments, capsys)
    assert line.startswith(f"python -m lab {arguments[0]}: ") and words in line, line


@pytest.mark.parametrize(
    ("check", "name", "asked"),
    [
        (output_folder, "new/results", "mkdir"),
        (output_file, "new.json", "mkdir"),
        (output_file, "there.txt", "open"),
        (existing_file, "there.txt", "access"),
    ],
)
def test_a_missing_permission_is_said_before_anything_is_done(
    check: Callable[[str], Path], name: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.txt"
    there.write_text("as it was")
    assert check(str(tmp_path / name)) == tmp_path / name
    assert list(tmp_path.iterdir()) == [there] and there.read_text() == "as it was"

    def refuse(path: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    # Root may do everything, so the system is asked in vain.
    for owner in (Path, os):
        if hasattr(owner, asked):
            monkeypatch.setattr(owner, asked, refuse if owner is Path else lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match=f"no permission to .*{re.escape(str(tmp_path))}"):
        check(str(tmp_path / name))


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of Linux in which nobody can make anything")
@pytest.mark.parametrize("check", [output_folder, output_file])
def test_a_folder_that_takes_nothing_is_said_before_anything_is_done(check: Callable[[str], Path]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^cannot write '/proc/nope': (nothing can be made|no perm)"):
        check("/proc/nope")


@pytest.mark.parametrize("check", [output_folder, output_file])
def test_a_name_that_the_system_does_not_take_is_refused(check: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^cannot write '.*nn': "):
        check(str(tmp_path / ("n" * 300)))


@pytest.mark.parametrize("command", ["demo", "eval"])
def test_the_default_folder_is_checked_too(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{command}-output").touch()
    assert "a file is in the way" in refused(laboratory.main, [command], capsys)


@pytest.mark.parametrize("command", ["choices", "lists"])
def test_what_only_a_gpu_can_do_says_so_in_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"^{command} needs a CUDA device, and torch finds none$"):
        laboratory.main([command])


def test_a_python_that_comfyui_cannot_run_in_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "main.py").touch()
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "__init__.py").touch()
    (tmp_path / "comfy" / "cli_args.py").write_text("import no_such_requirement")
    finished = subprocess.run(
        [sys.executable, "-m", "lab", "steps", "--comfyui", str(tmp_path), "--models", "tiny"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 1 and finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"the ComfyUI at {tmp_path} needs no_such_requirement, which {sys.executable} does not have")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import comfy_sage2
from comfy_sage2 import __main__ as command_line
from lab import __main__ as laboratory
from comfy_sage2.kernels import manifest
print(*manifest.architectures())
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
