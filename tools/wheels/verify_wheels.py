"""Rebuild the released wheels and compare them bit for bit with those in wheels/.

    python -m tools.wheels.verify_wheels [--arch sm90 ...] [--only cp312]

Needs what build_wheels.py needs. With --only the files of one CPython are rebuilt and compared, in a fifth of the time.
Exits with 1 when something differs, and names the files that do.

Where the kernels' sources have changed since the release, the release's own commit is checked out beside them and
verified there, which takes a clone with its history.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .. import kernel_table
from .build_wheels import build
from .stage_package import ROOT
from .wheel_folder import WHEELS, wheels_of

# What wheels are built from, and what changes with a release of them.
_SOURCES = ("csrc", "packages")
_RELEASE = "wheels/SHA256SUMS"
_COMMAND = "tools.wheels.verify_wheels"
# They list what is in the wheel, so they differ when a wheel was built for one CPython only.
_LISTINGS = (".dist-info/WHEEL", ".dist-info/RECORD")


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


def partial_difference(released: Path, rebuilt: Path) -> str | None:
    """How the files of `rebuilt`, which has one CPython's module, differ from the released ones; None if none does."""
    old, new = _members(released), _members(rebuilt)
    names = sorted(name for name in new if not name.endswith(_LISTINGS) and old.get(name) != new[name])
    return f"these files differ: {', '.join(names)}" if names else None


def released_wheel(architecture: str, rebuilt: Path) -> Path | None:
    """The wheel in wheels/ for the platform of a rebuilt one."""
    platform = rebuilt.stem.rpartition("-")[2]
    return next((path for path in wheels_of(architecture) if path.stem.endswith(f"-{platform}")), None)


def verify(architecture: str, interpreter: str | None, work: Path) -> bool:
    """Rebuild an architecture's wheels, device images included, and say whether they equal the released ones."""
    same = True
    for rebuilt in build(architecture, work / "wheelhouse", interpreter, work / "cubin-cache"):
        released = released_wheel(architecture, rebuilt)
        if released is None:
            found: str | None = "wheels/ has no wheel for this platform"
        else:
            found = (partial_difference if interpreter else difference)(released, rebuilt)
        print(f"{rebuilt.name}: {found or 'identical'}", flush=True)
        same = same and found is None
    return same


def _git(*arguments: str, root: Path) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def earlier_release(root: Path = ROOT) -> str | None:
    """The commit of the released wheels, or None where the sources at `root` are still those of the release.

    SystemExit where the history does not tell.
    """
    commit = _git("log", "-1", "--format=%H", "--", _RELEASE, root=root)
    if not commit or _git("rev-parse", "--is-shallow-repository", root=root) == "true":
        raise SystemExit(
            f"the commit that wrote {_RELEASE} is not known here: a clone with its whole history is needed"
        )
    return commit if _git("diff", "--name-only", commit, "--", *_SOURCES, root=root) else None


def verify_at(commit: str, arguments: list[str], root: Path = ROOT) -> int:
    """The exit status of this command at `commit`, in a working tree of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "release"
        _git("worktree", "add", "--detach", str(tree), commit, root=root)
        try:
            return subprocess.run([sys.executable, "-m", _COMMAND, *arguments], cwd=tree).returncode
        finally:
            _git("worktree", "remove", "--force", str(tree), root=root)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild released wheels and compare them bit for bit.")
    released = [name for name in kernel_table.names() if wheels_of(name)]
    parser.add_argument("--arch", nargs="+", default=released, choices=kernel_table.names())
    parser.add_argument("--only", metavar="TAG", help="one CPython, such as cp312")
    arguments = parser.parse_args()
    if not arguments.arch:
        raise SystemExit(f"{WHEELS} holds no wheels to verify")
    release = earlier_release()
    if release is not None:
        print(f"csrc/ or packages/ changed since the release: verifying it at {release[:10]}", flush=True)
        raise SystemExit(verify_at(release, sys.argv[1:]))
    with tempfile.TemporaryDirectory() as work:
        results = [verify(name, arguments.only, Path(work)) for name in arguments.arch]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
