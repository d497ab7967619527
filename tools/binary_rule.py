"""Refuse binary files that the history should not keep.

    python -m tools.binary_rule origin/main

Every full clone keeps every version of a file, and ComfyUI's manager makes full clones. So between that commit and
HEAD wheels may enter only with a higher version of the pack, as a release to users, and the demo's weights not at all:
kernels and models on trial stay in build/. Exits with 1 and the reason where one did.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_VERSION = re.compile(r'^version = "([\d.]+)"$', re.MULTILINE)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def _version(root: Path, commit: str) -> list[int]:
    """The pack's version at a commit."""
    found = _VERSION.search(_git(root, "show", f"{commit}:pyproject.toml"))
    if found is None:
        raise SystemExit(f"pyproject.toml has no version at {commit}")
    return [int(number) for number in found[1].split(".")]


def problems(base: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the commits after `base`, in words. CalledProcessError for a commit that is not there."""
    merge_base = _git(root, "merge-base", base, "HEAD").strip()
    # Of each commit by itself: a file that a later one removes stays in the history.
    listed = _git(root, "log", "--format=", "--name-only", "--diff-filter=AM", f"{merge_base}..HEAD")
    added = sorted(set(filter(None, listed.splitlines())))
    wheels = [name for name in added if name.endswith(".whl")]
    weights = [name for name in added if name.endswith(".safetensors")]
    found = []
    if wheels and _version(root, "HEAD") <= _version(root, merge_base):
        found.append(
            f"{', '.join(wheels)}: wheels enter git with a release to users, which raises the pack's version in "
            "pyproject.toml; keep those on trial in build/"
        )
    if weights:
        found.append(f"{', '.join(weights)}: weights are not trained anew in git; keep them in build/")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Refuse binary files that the history should not keep.")
    parser.add_argument("base", help="the commit that the submission is made to, such as origin/main")
    found = problems(parser.parse_args().base)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
