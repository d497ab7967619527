"""Shared by the tests of other platforms: the unpacked wheels under test, and each platform's recording driver.

COMFY_SAGE2_WHEELHOUSE names the folder of the wheels; by default they are those of wheels/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools import kernel_table
from tools.platforms import windows_python
from tools.platforms.foreign_python import ForeignPython
from tools.wheels.wheel_folder import wheels_for

ROOT = Path(__file__).resolve().parent.parent.parent
WHEELHOUSE = Path(os.environ.get("COMFY_SAGE2_WHEELHOUSE") or ROOT / "wheels").resolve()
DRIVER_SOURCE = ROOT / "tests" / "packaging" / "native" / "fake_driver.cpp"
PLATFORMS = json.loads((ROOT / "packages" / "kernels" / "platforms.json").read_text())
NATIVE = "linux_x86_64"
ARCHITECTURES = kernel_table.names()


Unpack = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """Unpacks the wheels of an architecture and a platform as pip would, and returns the folder for the Python path."""
    root = tmp_path_factory.mktemp("unpacked")

    def unpack(architecture: str, platform: str) -> Path:
        folder = root / platform / architecture
        if not folder.exists():
            tag = PLATFORMS[platform]["wheel_tag"]
            wheels = wheels_for(architecture, tag, WHEELHOUSE)
            assert wheels, f"{WHEELHOUSE} must hold the {architecture} wheels for {tag}"
            for path in wheels:
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(folder)
        return folder

    return unpack


@dataclass(frozen=True)
class Drivers:
    """The recording driver, compiled for a platform on first use, because zig's libraries first take minutes."""

    folder: Path

    def library(self, platform: str) -> Path:
        """The driver for a key of PLATFORMS. Its file has the CUDA driver's name on that platform."""
        library = self.folder / platform / ("nvcuda.dll" if platform.startswith("win") else "libcuda.so.1")
        if not library.exists():
            library.parent.mkdir()
            options = [] if platform.startswith("win") else ["-fPIC"]
            command = [
                str(windows_python.zig()), "c++", "-target", PLATFORMS[platform]["zig_target"], "-std=c++17", "-O3",
                "-DNDEBUG", "-shared", "-s", *options, "-o", str(library), str(DRIVER_SOURCE),
            ]  # fmt: skip
            subprocess.run(command, check=True)
        return library

    @contextmanager
    def installed(self, python: ForeignPython | None, log: Path) -> Iterator[dict[str, str]]:
        """The environment in which `python` (None: this interpreter) finds the driver, which writes to `log`."""
        environment = {"FAKE_CUDA_VERSION": "12090", "FAKE_CUDA_LOG": str(log)}
        compiled = self.library(NATIVE if python is None else python.platform)
        if python is None or not python.is_windows:
            yield {**environment, "LD_LIBRARY_PATH": str(compiled.parent)}
            return
        library = windows_python.system_folder() / compiled.name
        shutil.copyfile(compiled, library)
        try:
            yield {**environment, "FAKE_CUDA_LOG": python.path(log)}
        finally:
            library.unlink()


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    return Drivers(tmp_path_factory.mktemp("drivers"))
