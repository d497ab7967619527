"""The whole library in a Windows CPython with torch: install.py, the doctor in the portable's layout, the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.platforms import windows_python
from tools.platforms.foreign_python import ForeignPython

from .conftest import ARCHITECTURES, ROOT, Drivers

SECONDS = 1800
# Letters of two scripts and a blank, as in users' folders.
FOLDER = "Пакет узлов/comfy-sage2"
# Tests of what wine or this Windows lacks skip themselves. Left out: the words of another safetensors than wine 8 runs,
# and what takes long.
SUITES = {
    "packaging": ("tests/packaging", "-m", "not slow"),
    "core": ("tests/unit/core/test_options.py", "tests/unit/core/test_registry.py", "tests/unit/core/test_plan.py",
             "tests/unit/core/test_kernel_call.py", "tests/unit/core/test_module_plan.py",
             "tests/unit/core/test_masks.py", "tests/unit/core/test_edges.py", "tests/unit/core/test_bad_input.py",
             "tests/unit/core/test_rotation.py"),
    "files and texts": ("tests/unit/policy", "tests/unit/test_text.py", "tests/unit/autotune/test_cache_file.py",
                        "tests/unit/test_doctor.py"),
    "reference": ("tests/unit/evaluation/test_variants.py", "tests/unit/comfyui_adapter/test_accumulators.py",
                  "-m", "not slow"),
}  # fmt: skip


@pytest.fixture(scope="session")
def windows() -> ForeignPython:
    return windows_python.tested()


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack's files as a clone has them."""
    folder = tmp_path_factory.mktemp("clone") / FOLDER
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def portable(windows: ForeignPython, tmp_path_factory: pytest.TempPathFactory) -> ForeignPython:
    """The interpreter as ComfyUI's portable has it: its `._pth` file switches off the current folder and PYTHONPATH."""
    source = Path(windows.command[-1]).parent
    embedded = tmp_path_factory.mktemp("portable") / "python_embeded"
    embedded.mkdir()
    for file in source.glob("*.*"):
        if file.is_file():
            shutil.copyfile(file, embedded / file.name)
    number = windows.version.replace(".", "")
    paths = [windows.path(source / part) for part in ("Lib", "DLLs", "Lib/site-packages")]
    (embedded / f"python{number}._pth").write_text("\n".join(["../ComfyUI", *paths, "import site"]) + "\n")
    command = (*windows_python.wine_command(), str(embedded / "python.exe"))
    return ForeignPython(windows.platform, windows.version, command, windows.environment)


def _said(python: ForeignPython, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    completed = python.run(*arguments, environment=environment, timeout=SECONDS)
    assert "Traceback" not in completed.stderr, completed.stderr
    return completed.returncode, completed.stdout


def test_windows_install_unpacks_the_kernels_and_doctor_speaks(portable: ForeignPython, pack: Path) -> None:
    status, output = _said(portable, portable.path(pack / "install.py"))
    assert status == 0
    for name in ARCHITECTURES:
        (line,) = (line for line in output.splitlines() if f"{name} kernels: " in line)
        assert line.endswith(".pyd"), output
    assert "on Windows AMD64" in output


def test_windows_doctor_by_the_path_of_its_folder(
    portable: ForeignPython, pack: Path, drivers: Drivers, tmp_path: Path
) -> None:
    """The documented command. With a driver, every kernel module is ready."""
    status, output = _said(portable, portable.path(pack / "comfy_sage2"), "doctor")
    assert status == 1 and re.search("NVIDIA driver +not found", output), output
    with drivers.installed(portable, tmp_path / "log") as environment:
        _, output = _said(portable, portable.path(pack / "comfy_sage2"), "doctor", environment=environment)
    for name in ARCHITECTURES:
        (line,) = (line for line in output.splitlines() if line.strip().startswith(name) and "version" in line)
        assert "ready: version" in line, output


@pytest.mark.parametrize("suite", SUITES)
def test_windows_suite(windows: ForeignPython, pack: Path, suite: str) -> None:
    completed = windows.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES[suite],
        environment={"OMP_NUM_THREADS": "1"}, folder=pack, timeout=SECONDS,
    )  # fmt: skip
    print("\n".join(completed.stdout.splitlines()[-12:]))
    assert completed.returncode == 0, completed.stdout[-6000:] + completed.stderr[-2000:]
