"""Rebuild the released wheels and compare them bit for bit with those in wheels/.

    python -m tools.wheels.verify_wheels [--only cp312] [--wheels wheels]

Needs what build_wheels.py needs. With --only it rebuilds and compares the host modules of one CPython, in a fifth of
the time. Exits with 1 when something differs, and names the differing files.

wheels/README.md names the git trees that the wheels were built from. When csrc/ or packages/ has changed since, a
commit with those trees is checked out in a worktree and verifies the wheels. That needs a clone with full history.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .. import kernel_table
from . import packed_modules
from .build_wheels import build
from .release_wheels import TREES, git, recorded_trees
from .stage_package import ROOT
from .wheel_folder import WHEELS, wheels_of

_COMMAND = "tools.wheels.verify_wheels"
# These files list the content of a wheel, so they differ when it was built for only one CPython.
_LISTINGS = (".dist-info/WHEEL", ".dist-info/RECORD")


def _members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return packed_modules.unpack({name: archive.read(name) for name in archive.namelist()})


def difference(released: Path, rebuilt: Path) -> str | None:
    """How two wheels differ, in words, or None when their bytes are equal."""
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


def _tag(wheel: Path) -> str:
    return wheel.name.split("-", 2)[2]


def verify(folder: Path, interpreter: str | None, work: Path) -> bool:
    """Rebuild the wheels in `folder`, including the device images, and return whether they are the same."""
    released = {(wheel.name.split("-")[0], _tag(wheel)): wheel for wheel in sorted(folder.glob("*.whl"))}
    versions = {name: wheel.name.split("-")[1] for (name, _), wheel in released.items()}
    architectures = [name for name in kernel_table.names() if wheels_of(name, folder)]
    same = True
    for rebuilt in build(architectures, work / "wheelhouse", interpreter, work / "cubin-cache", versions):
        original = released.pop((rebuilt.name.split("-")[0], _tag(rebuilt)), None)
        if original is None:
            reason: str | None = f"{folder} has no such wheel"
        else:
            reason = (partial_difference if interpreter else difference)(original, rebuilt)
        print(f"{rebuilt.name}: {reason or 'identical'}", flush=True)
        same = same and reason is None
    for wheel in released.values():
        print(f"{wheel.name}: nothing like it is built", flush=True)
    return same and not released


def earlier_commit(trees: dict[str, str], root: Path = ROOT) -> str | None:
    """The newest commit with these trees, or None when the working tree has them.

    SystemExit when the history has no such commit.
    """

    def at(commit: str) -> dict[str, str]:
        return {name: git("rev-parse", f"{commit}:{name}", root=root) for name in TREES}

    if at("HEAD") == trees and not git("status", "--porcelain", "--", *TREES, root=root):
        return None
    for commit in git("log", "--format=%H", "--full-history", "--", *TREES, root=root).split():
        if (
            git("ls-tree", "--name-only", commit, "--", *TREES, root=root).split() == list(TREES)
            and at(commit) == trees
        ):
            return commit
    named = " and ".join(f"{name} {tree}" for name, tree in trees.items())
    raise SystemExit(f"no commit here has the trees {named}: this needs a clone with full history")


def verify_at(commit: str, arguments: list[str], root: Path = ROOT) -> int:
    """Run this command at `commit`, in a worktree of its own, and return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "release"
        git("worktree", "add", "--detach", str(tree), commit, root=root)
        try:
            return subprocess.run([sys.executable, "-m", _COMMAND, *arguments], cwd=tree).returncode
        finally:
            git("worktree", "remove", "--force", str(tree), root=root)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild released wheels and compare them bit for bit.")
    parser.add_argument("--only", metavar="TAG", help="one CPython, such as cp312")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="the folder of the released wheels")
    arguments = parser.parse_args()
    folder: Path = arguments.wheels.resolve()
    if not any(folder.glob("*.whl")):
        raise SystemExit(f"{folder} holds no wheels to verify")
    commit = earlier_commit(recorded_trees(folder))
    if commit is not None:
        print(f"csrc/ or packages/ changed since the release: verifying it at {commit[:10]}", flush=True)
        only = [] if arguments.only is None else ["--only", arguments.only]
        raise SystemExit(verify_at(commit, [*only, "--wheels", str(folder)]))
    with tempfile.TemporaryDirectory() as work:
        raise SystemExit(0 if verify(folder, arguments.only, Path(work)) else 1)


if __name__ == "__main__":
    main()
