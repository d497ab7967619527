"""Released wheels are verified in place or at a commit that has their trees, each against a build of its version."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="the wheel tools need Python 3.11")
from tools.wheels import verify_wheels
from tools.wheels.release_wheels import TREES, git

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="a release needs git")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose first commit is a release; its command prints the sources that it sees and exits with 3."""
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


def _trees(repository: Path) -> dict[str, str]:
    return {name: git("rev-parse", f"HEAD:{name}", root=repository) for name in TREES}


@pytest.mark.parametrize("source", ["csrc/kernel.cu", "packages/build", "csrc/new.h"])
def test_after_later_commits_a_release_is_verified_at_one_with_its_trees(
    repository: Path, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trees, release = _trees(repository), git("rev-parse", "HEAD", root=repository)
    (repository / source).write_text("changed")
    _commit(repository)
    assert verify_wheels.earlier_commit(trees, repository) == release
    assert verify_wheels.verify_at(release, ["--only", "cp312"], repository) == 3
    assert capfd.readouterr().out.endswith("released --only cp312\n")
    assert not (repository / ".git" / "worktrees").exists()


@pytest.mark.parametrize("interpreter", [None, "cp312"])
def test_each_released_wheel_is_compared_with_one_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interpreter: str | None
) -> None:
    released, builds = tmp_path / "released", []
    released.mkdir()

    def write(folder: Path, name: str, content: str) -> Path:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr(zipfile.ZipInfo("file"), content)
        return folder / name

    same, host = "comfy_sage2_sm90-1.0.0-py3-none-any.whl", "comfy_sage2_host-2.0.0-py3-none-linux.whl"

    def build(architectures: list[str], out: Path, *arguments: object) -> list[Path]:
        out.mkdir(parents=True)
        builds.append((architectures, *arguments[-1:]))
        return [write(out, same, "images"), write(out, host, content)]

    monkeypatch.setattr(verify_wheels, "build", build)
    write(released, same, "images")
    write(released, host, "module")
    for content, expected in (("module", True), ("changed", False)):
        assert verify_wheels.verify(released, interpreter, tmp_path / content) is expected
    write(released, "comfy_sage2_host-2.0.0-py3-none-windows.whl", "module")
    content = "module"
    assert verify_wheels.verify(released, interpreter, tmp_path / "third") is False
    assert builds[0] == (["sm90"], {"comfy_sage2_sm90": "1.0.0", "comfy_sage2_host": "2.0.0"})
    assert "windows.whl: nothing like it is built" in capsys.readouterr().out
