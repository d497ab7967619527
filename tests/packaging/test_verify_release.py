"""Where released wheels are verified: in place, or at the release's own commit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.wheels import verify_wheels

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="a release needs git")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose first commit is a release; its command tells which sources it sees, and ends with 3."""
    root = tmp_path / "repository"
    _run("init", "--quiet", str(root), cwd=tmp_path)
    for name, text in {
        "csrc/kernel.cu": "released",
        "packages/build": "released",
        "wheels/SHA256SUMS": "sums",
        "tools/wheels/verify_wheels.py": "import sys; print(open('csrc/kernel.cu').read(), *sys.argv[1:]); sys.exit(3)",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    _commit(root)
    return root


def _run(*arguments: str, cwd: Path) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=cwd, check=True)


def _commit(root: Path) -> None:
    _run("add", "--all", cwd=root)
    _run("commit", "--quiet", "--message", "a change", cwd=root)


def test_a_release_is_verified_in_place_until_its_sources_change(repository: Path) -> None:
    (repository / "README.md").write_text("other")
    _commit(repository)
    assert verify_wheels.earlier_release(repository) is None


@pytest.mark.parametrize("source", ["csrc/kernel.cu", "packages/build", "csrc/new.h"])
def test_a_release_is_verified_at_its_own_commit_after_that(
    repository: Path, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    release = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=repository, text=True).strip()
    (repository / source).write_text("changed")
    _commit(repository)
    assert verify_wheels.earlier_release(repository) == release
    assert verify_wheels.verify_at(release, ["--only", "cp312"], repository) == 3
    assert capfd.readouterr().out.endswith("released --only cp312\n")
    assert not (repository / ".git" / "worktrees").exists()


def test_a_clone_without_history_cannot_tell(repository: Path, tmp_path: Path) -> None:
    _run("clone", "--quiet", "--depth=1", f"file://{repository}", "shallow", cwd=tmp_path)
    with pytest.raises(SystemExit, match="a clone with its whole history"):
        verify_wheels.earlier_release(tmp_path / "shallow")
