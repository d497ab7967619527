"""Debian's CPythons, unpacked into a folder without being installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# CPython's version -> the Debian release that has it. None of the present ones has 3.10 or 3.12.
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}


def can_unpack() -> bool:
    """Whether the program that unpacks Debian's packages is here (apt-get install mmdebstrap; it wants root)."""
    return shutil.which("mmdebstrap") is not None


def python_root(version: str, architecture: str, folder: Path) -> Path:
    """The root folder of a Debian with the CPython of a version in SUITES, fetched once into `folder`.

    architecture: Debian's name, such as "arm64". CalledProcessError when the packages cannot be fetched.
    """
    root = folder / f"debian-{architecture}-{version}"
    if not root.exists():
        partial = folder / f".{root.name}"
        shutil.rmtree(partial, ignore_errors=True)
        packages = f"python{version},libpython{version}-stdlib,libc6,libgcc-s1,libstdc++6"
        # Only unpacked: no program of it runs. An index that is past its date is good enough for tests.
        command = [
            "mmdebstrap", "--variant=extract", f"--architectures={architecture}", f"--include={packages}",
            '--aptopt=Acquire::Check-Valid-Until "false"', "--quiet", SUITES[version], str(partial),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        # Programs name the dynamic linker in /lib, which newer releases have in /usr/lib alone.
        if not (partial / "lib").exists():
            (partial / "lib").symlink_to("usr/lib")
        partial.rename(root)
    return root
