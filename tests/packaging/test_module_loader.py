"""The host module of this Python, from the archive of all host modules that pip installs."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_module import CANNOT_COMPILE, native_module

from tools.wheels import packed_modules

PACKAGE = "comfy_sage2_host"
OWN = "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]
OTHERS = ("_C.cpython-27-x86_64-linux-gnu.so", "_C.cp27-win_amd64.pyd")
needs_compiler = pytest.mark.skipif(CANNOT_COMPILE, reason="needs gcc on Linux")
SHOW = f"from {PACKAGE} import _C; print(_C.version, _C.__file__); from {PACKAGE}._C import version"


def install(folder: Path, modules: dict[str, bytes]) -> None:
    """Write the package where pip would; modules that an earlier version unpacked stay there."""
    (folder / PACKAGE).mkdir(exist_ok=True)
    (folder / PACKAGE / "__init__.py").touch()
    files = packed_modules.pack(PACKAGE, {f"{PACKAGE}/{name}": content for name, content in modules.items()})
    for name, content in files.items():
        (folder / name).write_bytes(content)


def run(folder: Path, code: str = SHOW) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(folder / "temporary")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def shown(folder: Path) -> tuple[str, Path]:
    """The module's version and its path."""
    process = run(folder)
    assert process.returncode == 0, process.stderr
    version, path = process.stdout.split()
    return version, Path(path)


@needs_compiler
def test_unpacked_modules_of_an_earlier_version_do_not_hide_a_newer_one(tmp_path: Path) -> None:
    paths = []
    for version in ("1.0", "2.0"):
        install(tmp_path, {OTHERS[0]: b"another", OWN: native_module(version)})
        for _ in range(2):  # unpacked, then found
            loaded, path = shown(tmp_path)
            assert loaded == version and path.name == OWN and path.is_relative_to(tmp_path / PACKAGE)
        paths.append(path)
    assert paths[0] != paths[1]
    paths[1].write_bytes(b"damaged")
    assert shown(tmp_path) == ("2.0", paths[1])


def test_a_missing_module_for_this_python_is_an_import_error(tmp_path: Path) -> None:
    install(tmp_path, {name: b"another" for name in OTHERS})
    process = run(tmp_path)
    assert process.returncode != 0
    assert f"ImportError: {PACKAGE} has no module for {sys.implementation.name}" in process.stderr
    assert ", ".join(OTHERS) in process.stderr
