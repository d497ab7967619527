"""What a submission may add to the history."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools import binary_rule

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    _git(tmp_path, "init", "--quiet", "--initial-branch=main")
    _commit(tmp_path, **{"pyproject.toml": 'version = "0.9.0"\n', "wheels/a.whl": "old", "models/a.safetensors": "old"})
    _git(tmp_path, "checkout", "--quiet", "-b", "submission")
    return tmp_path


def _git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=root, check=True)


def _commit(root: Path, **files: str) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "--message", "a change")


def test_texts_may_come_at_any_time(repository: Path) -> None:
    _commit(repository, **{"csrc/a.cu": "new"})
    assert binary_rule.problems("main", repository) == []


@pytest.mark.parametrize("version", ["0.10.0", "1.0.0"])
def test_wheels_come_with_a_release(repository: Path, version: str) -> None:
    _commit(repository, **{"wheels/b.whl": "new"})
    _commit(repository, **{"pyproject.toml": f'version = "{version}"\n'})
    assert binary_rule.problems("main", repository) == []


@pytest.mark.parametrize("wheel", ["wheels/a.whl", "wheels/b.whl"])
def test_wheels_on_trial_are_refused(repository: Path, wheel: str) -> None:
    _commit(repository, **{wheel: "new"})
    (found,) = binary_rule.problems("main", repository)
    assert found.startswith(f"{wheel}: wheels enter git with a release")


def test_a_wheel_that_is_removed_again_is_in_the_history(repository: Path) -> None:
    _commit(repository, **{"wheels/b.whl": "new"})
    (repository / "wheels" / "b.whl").unlink()
    _commit(repository)
    assert len(binary_rule.problems("main", repository)) == 1


def test_weights_are_refused_with_a_release_too(repository: Path) -> None:
    _commit(repository, **{"models/a.safetensors": "new", "pyproject.toml": 'version = "1.0.0"\n'})
    (found,) = binary_rule.problems("main", repository)
    assert found.startswith("models/a.safetensors: weights are not trained anew")


def test_what_the_base_got_meanwhile_does_not_count(repository: Path) -> None:
    _git(repository, "checkout", "--quiet", "main")
    _commit(repository, **{"wheels/c.whl": "new", "pyproject.toml": 'version = "2.0.0"\n'})
    _git(repository, "checkout", "--quiet", "submission")
    _commit(repository, **{"README.md": "new"})
    assert binary_rule.problems("main", repository) == []
