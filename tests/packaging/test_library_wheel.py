"""`pip install .`: the library with its kernels and types, without the laboratory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fake_pack import ROOT

pytest.importorskip("hatchling", reason="hatchling builds the library's wheel")

SHOW = """
import sys
sys.modules["torch"] = None
import comfy_sage2
from comfy_sage2.kernels import bundled, loader
print(comfy_sage2.__file__, bundled.WHEELS, sep="\\n")
for architecture in bundled.architectures():
    bundled.find(architecture).read()
    print(architecture)
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--no-input", *arguments], check=True, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_the_library_its_kernels_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"comfy_sage2"}
    assert "comfy_sage2/py.typed" in names
    kernels = {name.removeprefix("comfy_sage2/wheels/") for name in names if name.startswith("comfy_sage2/wheels/")}
    assert kernels == {path.name for path in (ROOT / "wheels").iterdir()}
    assert not [name for name in names if "_unpacked" in name or "__pycache__" in name]


def test_the_installed_library_finds_its_kernels(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", SHOW]
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    library, wheels, *architectures = process.stdout.splitlines()
    assert Path(library).is_relative_to(site) and Path(wheels) == site / "comfy_sage2" / "wheels"
    assert architectures == ["sm120", "sm80", "sm89", "sm90"]
