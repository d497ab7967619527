"""Taking built wheels over into wheels/."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_pack import ROOT

pytest.importorskip("tomllib", reason="the wheel tools need Python 3.11")
if shutil.which("git") is None:
    pytest.skip("a release needs git", allow_module_level=True)
from tools import kernel_table
from tools.wheels import release_wheels, wheel_folder


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one committed architecture, at version 2.0.0."""
    root = tmp_path / "repository"
    for folder in ("csrc", "packages/kernels", "tools/wheels", "wheels"):
        (root / folder).mkdir(parents=True)
    for name in ("tools/kernel_table.py", "tools/wheels/stage_package.py", "packages/kernels/pyproject.toml.in"):
        shutil.copyfile(ROOT / name, root / name)
    entry = {
        "family": "sm99", "hardware": "a GPU of the test", "capabilities": ["9.9"], "modes": ["8b"],
        "pv_formats": ["fp8"], "pv_accumulators": ["fp32"], "minimum_driver": "525", "targets": ["sm_99"],
        "defines": {}, "ptxas_options": [],
    }  # fmt: skip
    table = {"families": {"sm99": {"host_sources": [], "cubins": {}}}, "architectures": {"sm99": entry}}
    (root / "csrc" / "architectures.json").write_text(json.dumps(table))
    (root / "csrc" / "VERSION").write_text("2.0.0\n")
    author = ["-c", "user.name=a test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    monkeypatch.setattr(kernel_table, "CSRC", root / "csrc")
    monkeypatch.setattr(kernel_table, "TABLE", root / "csrc" / "architectures.json")
    monkeypatch.setattr(release_wheels, "ROOT", root)
    monkeypatch.setattr(release_wheels, "WHEELS", root / "wheels")
    monkeypatch.setattr(wheel_folder, "WHEELS", root / "wheels")
    return root


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for version in ("1.0.0", "2.0.0"):
        for tag in ("cp311", "cp312"):
            (folder / f"comfy_sage2_sm99-{version}-{tag}-{tag}-any.whl").write_text(f"{version} {tag}")
    return folder


def test_the_wheels_of_the_version_replace_the_older_ones(repository: Path, wheelhouse: Path) -> None:
    (repository / "wheels" / "comfy_sage2_sm99-1.0.0-cp310-cp310-any.whl").write_text("old")
    release_wheels.release(wheelhouse)
    names = [f"comfy_sage2_sm99-2.0.0-{tag}-{tag}-any.whl" for tag in ("cp311", "cp312")]
    assert sorted(path.name for path in (repository / "wheels").glob("*.whl")) == names
    sums = (repository / "wheels" / "SHA256SUMS").read_text().splitlines()
    assert sums == [f"{hashlib.sha256((wheelhouse / name).read_bytes()).hexdigest()}  {name}" for name in names]


def test_the_readme_says_what_the_wheels_were_built_from(repository: Path, wheelhouse: Path) -> None:
    release_wheels.release(wheelhouse)
    text = (repository / "wheels" / "README.md").read_text()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert commit in text and "a GPU of the test" in text and "nvidia-cuda-nvrtc-cu12==12.9" in text


def test_uncommitted_sources_are_not_released(repository: Path, wheelhouse: Path) -> None:
    (repository / "csrc" / "VERSION").write_text("2.0.0\n\n")
    with pytest.raises(SystemExit, match="commit the kernels' sources"):
        release_wheels.release(wheelhouse)
    assert not (repository / "wheels" / "SHA256SUMS").exists()


def test_a_folder_that_would_get_too_big_is_refused(
    repository: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_wheels, "MAX_FOLDER_BYTES", 10)
    with pytest.raises(SystemExit, match="at most"):
        release_wheels.release(wheelhouse)
