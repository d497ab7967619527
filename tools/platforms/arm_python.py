"""CPythons for aarch64: Debian's packages, run by qemu-user.

Needs qemu-aarch64 (apt-get install qemu-user), apt-get and dpkg-deb, and no rights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from . import debian
from .foreign_python import ForeignPython

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "platforms"
PLATFORM = "linux_aarch64"
VERSIONS = tuple(debian.SUITES)


def missing_tools() -> list[str]:
    """The programs that are needed and not here."""
    return [name for name in ("qemu-aarch64",) if shutil.which(name) is None] + debian.missing_tools()


def interpreter(version: str, folder: Path = FOLDER) -> ForeignPython:
    """CPython of a version in VERSIONS. Unavailable when Debian's packages cannot be fetched."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    root = debian.python_root(version, "arm64", folder)
    command = ("qemu-aarch64", "-L", str(root), str(root / "usr" / "bin" / f"python{version}"))
    return ForeignPython(PLATFORM, version, command, {"PYTHONHOME": str(root / "usr")})


def prepare(folder: Path = FOLDER) -> None:
    """Put all of them together, and say what they are. Unavailable when something cannot be fetched."""
    for version in VERSIONS:
        print(interpreter(version, folder).describe())
