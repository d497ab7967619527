"""The kernel modules of other platforms import, and print and launch the same as on Linux x86-64."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.platforms import arm_python, windows_python
from tools.platforms.foreign_python import ForeignPython

from .conftest import ARCHITECTURES, NATIVE, ROOT, Drivers, Unpack

INTERPRETERS = [
    *(pytest.param(("windows", version), id=f"windows-{version}") for version in windows_python.VERSIONS),
    *(pytest.param(("arm", version), id=f"arm-{version}") for version in arm_python.VERSIONS),
]
# The interpreters for comparing calls: one for each platform, because the host code is the same for all.
COMPARED = [
    pytest.param(("windows", "3.11"), id="windows-3.11"),
    pytest.param(("arm", "3.13"), id="arm-3.13"),
]
CALLS = Path(__file__).resolve().parent / "calls.py"
CHECK = ROOT / "packages" / "kernels" / "check_wheel.py"


@pytest.fixture
def python(request: pytest.FixtureRequest) -> ForeignPython:
    system, version = request.param
    if system == "arm":
        return arm_python.interpreter(version)
    interpreter = windows_python.interpreter(version)
    if interpreter is None:
        pytest.skip(f"no standard library of CPython {version} on this machine")
    return interpreter


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("python", INTERPRETERS, indirect=True)
def test_a_module_imports_without_torch_and_without_a_driver(
    python: ForeignPython, architecture: str, unpack: Unpack
) -> None:
    folder = python.path(unpack(architecture, python.platform))
    code = (
        f"import runpy, sys; sys.path.insert(0, {folder!r}); "
        f"runpy.run_path({python.path(CHECK)!r})['main']([{architecture!r}])"
    )
    completed = python.run("-c", code)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(f"comfy_sage2_{architecture} "), completed.stdout
    assert "no NVIDIA driver was found" in completed.stdout, completed.stdout


def _native(folder: Path, architecture: str, environment: dict[str, str]) -> str:
    """What the calls print in this interpreter."""
    command = [sys.executable, str(CALLS), str(folder), architecture]
    completed = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("python", COMPARED, indirect=True)
def test_everything_that_reaches_the_gpu_is_byte_identical(
    python: ForeignPython, architecture: str, unpack: Unpack, drivers: Drivers, tmp_path: Path
) -> None:
    native_log, log = tmp_path / "native.log", tmp_path / "foreign.log"
    with drivers.installed(None, native_log) as environment:
        expected = _native(unpack(architecture, NATIVE), architecture, environment)
    with drivers.installed(python, log) as environment:
        arguments = (python.path(CALLS), python.path(unpack(architecture, python.platform)), architecture)
        completed = python.run(*arguments, environment=environment)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == expected
    native_lines, lines = native_log.read_text().splitlines(), log.read_text().splitlines()
    launches = sum(line.startswith("cuLaunchKernelEx") for line in lines)
    assert launches > 500 and not any(line.startswith("missing") for line in lines)
    different = [pair for pair in zip(native_lines, lines, strict=False) if pair[0] != pair[1]]
    assert len(lines) == len(native_lines) and not different, (
        f"{len(different)} lines differ, the first: {different[:1]}"
    )
    print(f"{architecture}: {launches} launches identical")


@pytest.mark.parametrize("python", COMPARED[:1], indirect=True)
def test_the_driver_is_taken_from_the_system_folder_only(
    python: ForeignPython, unpack: Unpack, drivers: Drivers, tmp_path: Path
) -> None:
    """A library of the driver's name in the current folder or on the PATH is not loaded."""
    shutil.copyfile(drivers.library(python.platform), tmp_path / "nvcuda.dll")
    folder = python.path(unpack("sm90", python.platform))
    code = f"import sys; sys.path.insert(0, {folder!r}); import comfy_sage2_sm90 as module; module.driver_version()"
    environment = {"FAKE_CUDA_VERSION": "12090", "FAKE_CUDA_LOG": python.path(tmp_path / "log")}
    completed = python.run("-c", code, environment=environment, folder=tmp_path)
    assert "no NVIDIA driver was found: nvcuda.dll cannot be opened" in completed.stderr
