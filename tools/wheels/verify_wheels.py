"""Rebuild one released wheel of each architecture and compare it bit for bit with the one in wheels/.

    python -m tools.wheels.verify_wheels [--arch sm90 ...] [--interpreter cp312]

Needs what build_wheels.py needs. Exits with 1 when a rebuilt wheel differs, and names the files in it that do.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

from .. import kernel_table
from .build_wheels import build
from .wheel_folder import WHEELS, wheels_of


def _members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def difference(released: Path, rebuilt: Path) -> str | None:
    """How two wheels differ, in words, or None when they are the same bits."""
    if released.read_bytes() == rebuilt.read_bytes():
        return None
    old, new = _members(released), _members(rebuilt)
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return f"these files differ: {', '.join(names)}" if names else "the same files, packed differently"


def verify(architecture: str, interpreter: str, wheelhouse: Path) -> bool:
    """Rebuild an architecture's wheel for one CPython tag, and say whether it equals the released one."""
    build(architecture, wheelhouse, interpreter, reuse_cubins=False)
    (rebuilt,) = wheels_of(architecture, wheelhouse)
    released = WHEELS / rebuilt.name
    if not released.exists():
        print(f"{rebuilt.name}: wheels/ has no wheel of this name")
        return False
    found = difference(released, rebuilt)
    print(f"{rebuilt.name}: {found or 'identical'}")
    return found is None


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild released wheels and compare them bit for bit.")
    released = [name for name in kernel_table.names() if wheels_of(name)]
    parser.add_argument("--arch", nargs="+", default=released, choices=kernel_table.names())
    parser.add_argument("--interpreter", default="cp312", metavar="TAG")
    arguments = parser.parse_args()
    if not arguments.arch:
        raise SystemExit("wheels/ holds no wheels to verify")
    with tempfile.TemporaryDirectory() as wheelhouse:
        results = [verify(name, arguments.interpreter, Path(wheelhouse)) for name in arguments.arch]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
