"""A small extension module for this Python, compiled from native/module.c."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from comfy_sage2.kernels.loader import ABI_VERSION

NATIVE = Path(__file__).resolve().parent / "native"
CANNOT_COMPILE = shutil.which("gcc") is None or sys.platform != "linux"


@cache
def native_module(version: str, abi: int = ABI_VERSION) -> bytes:
    """A compiled module that the loader can import."""
    defines = [f'-DVERSION="{version}"', '-DARCHITECTURE="sm90"', f"-DABI={abi}"]
    command = ["gcc", "-shared", "-fPIC", *defines, "-I", sysconfig.get_path("include"), str(NATIVE / "module.c")]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "module.so"
        subprocess.run([*command, "-o", str(output)], check=True, timeout=600)
        return output.read_bytes()
