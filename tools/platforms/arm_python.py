"""CPythons for aarch64: Debian's packages, run by qemu-user.

Needs qemu-aarch64 (apt-get install qemu-user), apt-get and dpkg-deb, but not root.
"""

from __future__ import annotations

from pathlib import Path

from . import debian
from .foreign_python import ForeignPython

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "platforms"
PLATFORM = "linux_aarch64"
VERSIONS = tuple(debian.SUITES)


def interpreter(version: str, folder: Path = FOLDER) -> ForeignPython:
    """The CPython of this version, one of VERSIONS."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    root = debian.python_root(version, "arm64", folder)
    command = ("qemu-aarch64", "-L", str(root), str(root / "usr" / "bin" / f"python{version}"))
    return ForeignPython(PLATFORM, version, command, {"PYTHONHOME": str(root / "usr")})
