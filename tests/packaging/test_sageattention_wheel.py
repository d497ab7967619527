"""`pip install ./packages/sageattention`: library, kernels and the module for hosts outside of ComfyUI."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fake_pack import ROOT

from comfy_sage2 import __version__

pytest.importorskip("hatchling", reason="hatchling builds the wheel")

PROJECT = ROOT / "packages" / "sageattention"
REFERENCE = {"COMFY_SAGE2_SAGEATTENTION_BACKEND": "reference"}
# As Python's own start does for its site-packages: .pth files are read.
START = "import importlib.metadata, importlib.util, site, sys\nsite.addsitedir({site!r})\n"
CALL = """
import torch
from sageattention import sageattn
q = torch.randn(1, 2, 40, 64)
out = sageattn(q, q, q)
wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q)
print("close:", bool((out - wanted).abs().sum() < 0.06 * wanted.abs().sum()))
print("version:", importlib.metadata.version("sageattention"), importlib.metadata.version("comfy-sage2-sageattention"))
print("library:", sys.modules["comfy_sage2"].__file__)
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--no-input", *arguments], check=True, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(PROJECT))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def run(site: Path, code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COMFY_SAGE2", "PYTHON"))}
    command = [sys.executable, "-c", START.format(site=str(site)) + code]
    environment |= variables
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_library_kernels_and_the_line_for_pythons_path(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    information = f"comfy_sage2_sageattention-{__version__}.dist-info"
    assert tops == {"comfy_sage2", "comfy_sage2_sageattention.pth", information}
    kernels = {name.removeprefix("comfy_sage2/wheels/") for name in names if name.startswith("comfy_sage2/wheels/")}
    assert kernels == {path.name for path in (ROOT / "wheels").iterdir()}
    assert not [name for name in names if "__pycache__" in name]


def test_the_module_serves_calls(site: Path) -> None:
    printed = run(site, CALL, **REFERENCE)
    assert "close: True" in printed
    assert f"version: 2.2.0+comfy.sage2 {__version__}" in printed
    assert f"library: {site / 'comfy_sage2' / '__init__.py'}" in printed


def test_without_kernels_it_is_missing(site: Path) -> None:
    code = "try:\n    import sageattention\nexcept ModuleNotFoundError as error:\n    print(error.name, error)\n"
    assert "sageattention [SA-601]" in run(site, code, CUDA_VISIBLE_DEVICES="")


def test_a_look_does_not_import_torch(site: Path) -> None:
    """It could start CUDA, and processes that a host forks afterwards would have none."""
    look = "print(importlib.util.find_spec('sageattention').name, 'torch' in sys.modules)\n"
    assert "sageattention False" in run(site, look)


def test_an_installed_one_that_works_is_served_first(site: Path, tmp_path: Path) -> None:
    (tmp_path / "sageattention").mkdir()
    (tmp_path / "sageattention" / "__init__.py").write_text("def sageattn(): return 'its own'\n")
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport sageattention\nprint(sageattention.sageattn())\n"
    assert "its own" in run(site, code, **REFERENCE)
