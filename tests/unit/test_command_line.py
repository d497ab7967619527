"""`python -m comfy_sage2`: which commands it offers and how it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from comfy_sage2 import __main__ as command_line
from lab import __main__ as laboratory

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_offered_command_has_a_main() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "comfy_sage2", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "doctor" in finished.stdout
    assert "bench" in finished.stdout


@pytest.mark.parametrize(
    ("program", "main", "command"),
    [
        ("comfy_sage2", command_line.main, "doctor"),
        ("comfy_sage2", command_line.main, "bench"),
        ("lab", laboratory.main, "demo"),
        ("lab", laboratory.main, "eval"),
    ],
)
def test_help_of_a_command(
    program: str, main: Callable[[list[str]], int], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as finished:
        main([command, "--help"])
    assert finished.value.code == 0
    assert f"python -m {program} {command}" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as finished:
        command_line.main(["dance"])
    assert finished.value.code == 2
    assert "'dance'" in capsys.readouterr().err


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
