"""A small extension module of the C source beside this file, for this Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

NATIVE = Path(__file__).resolve().parent / "native"
CANNOT_COMPILE = shutil.which("gcc") is None or sys.platform != "linux"


def native_module(folder: Path, version: str, abi: int | None, architecture: str = "sm90") -> bytes:
    """A compiled module that the loader can import."""
    output = folder / f"{version}.so"
    defines = [f'-DVERSION="{version}"', f'-DARCHITECTURE="{architecture}"', *([] if abi is None else [f"-DABI={abi}"])]
    command = ["gcc", "-shared", "-fPIC", *defines, "-I", sysconfig.get_path("include"), str(NATIVE / "module.c")]
    subprocess.run([*command, "-o", str(output)], check=True, timeout=600)
    return output.read_bytes()
