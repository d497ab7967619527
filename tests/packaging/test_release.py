"""The release of built wheels into wheels/."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
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
    for name in (
        "tools/kernel_table.py", "tools/wheels/stage_package.py", "tools/wheels/split_wheels.py",
        "packages/kernels/pyproject.toml.in",
    ):  # fmt: skip
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


def _wheel(folder: Path, part: str, version: str, tag: str, image: str) -> Path:
    name = f"comfy_sage2_{part}-{version}"
    path = folder / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"comfy_sage2_{part}/image", image)
        archive.writestr(f"{name}.dist-info/METADATA", f"Name: {part}\nVersion: {version}\n\nVersion: of the text\n")
        archive.writestr(f"{name}.dist-info/RECORD", version)
    return path


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for version in ("1.0.0", "2.0.0"):
        _wheel(folder, "sm99", version, "py3-none-any", "new")
        for platform in ("linux", "windows"):
            _wheel(folder, "host", version, f"py3-none-{platform}", platform)
    return folder


NAMES = [
    "comfy_sage2_host-2.0.0-py3-none-linux.whl", "comfy_sage2_host-2.0.0-py3-none-windows.whl",
    "comfy_sage2_sm99-2.0.0-py3-none-any.whl",
]  # fmt: skip


def _released(repository: Path) -> list[str]:
    return sorted(path.name for path in (repository / "wheels").glob("*.whl"))


def test_the_wheels_of_the_version_replace_the_older_ones(repository: Path, wheelhouse: Path) -> None:
    (repository / "wheels" / "comfy_sage2_sm99-1.0.0-cp310-cp310-any.whl").write_text("of images and modules")
    _wheel(repository / "wheels", "host", "1.0.0", "py3-none-linux", "other")
    release_wheels.release(wheelhouse)
    assert _released(repository) == NAMES
    lines = (repository / "wheels" / "SHA256SUMS").read_text().splitlines()
    assert lines == [f"{hashlib.sha256((wheelhouse / name).read_bytes()).hexdigest()}  {name}" for name in NAMES]


def test_a_wheel_that_differs_only_in_its_version_stays(repository: Path, wheelhouse: Path) -> None:
    kept = _wheel(repository / "wheels", "sm99", "1.5.0", "py3-none-any", "new")
    _wheel(repository / "wheels", "host", "1.5.0", "py3-none-linux", "linux")
    _wheel(repository / "wheels", "host", "1.5.0", "py3-none-windows", "other")
    before = kept.read_bytes()
    release_wheels.release(wheelhouse)
    assert kept.read_bytes() == before
    assert _released(repository) == [
        "comfy_sage2_host-1.5.0-py3-none-linux.whl", "comfy_sage2_host-2.0.0-py3-none-windows.whl", kept.name,
    ]  # fmt: skip


def test_the_readme_says_what_the_wheels_were_built_from(repository: Path, wheelhouse: Path) -> None:
    release_wheels.release(wheelhouse)
    text = (repository / "wheels" / "README.md").read_text()
    trees = {name: release_wheels.git("rev-parse", f"HEAD:{name}") for name in release_wheels.TREES}
    assert release_wheels.recorded_trees(repository / "wheels") == trees
    assert "a GPU of the test" in text and "nvidia-cuda-nvrtc-cu12==12.9" in text


def test_uncommitted_sources_are_not_released(repository: Path, wheelhouse: Path) -> None:
    (repository / "csrc" / "VERSION").write_text("2.0.0\n\n")
    with pytest.raises(SystemExit, match="commit the kernels' sources"):
        release_wheels.release(wheelhouse)
    assert not (repository / "wheels" / "SHA256SUMS").exists()
