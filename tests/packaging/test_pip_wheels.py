"""`pip install .` and `pip install ./packages/sageattention`: library and kernels.

The second is for hosts other than ComfyUI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fake_pack import ROOT

from comfy_sage2 import __version__

pytest.importorskip("hatchling", reason="hatchling builds the wheels")

LIBRARY, SAGEATTENTION = ROOT, ROOT / "packages" / "sageattention"
REFERENCE = {"COMFY_SAGE2_SAGEATTENTION_BACKEND": "reference"}
# Like Python's own start for site-packages: .pth files are read.
START = "import importlib.metadata, importlib.util, site, sys\nsite.addsitedir({site!r})\n"
SHOW = """
sys.modules["torch"] = None
import comfy_sage2
from comfy_sage2.kernels import bundled
print(comfy_sage2.__file__, bundled.WHEELS, sep="\\n")
for architecture in bundled.architectures():
    bundled.fitting(architecture)[0].read()
    print(architecture)
"""
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
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """The wheel of a project's folder."""

    @cache
    def build(project: Path) -> Path:
        folder = tmp_path_factory.mktemp("wheel")
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
        pip("wheel", *options, str(project))
        (path,) = folder.glob("*.whl")
        return path

    return build


@pytest.fixture(scope="module")
def site_of(wheel_of: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A folder with the installed wheel of a project."""

    @cache
    def install(project: Path) -> Path:
        folder = tmp_path_factory.mktemp("site")
        pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel_of(project)))
        return folder

    return install


def run(site: Path, code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COMFY_SAGE2", "PYTHON"))}
    command = [sys.executable, "-c", START.format(site=str(site)) + code]
    environment |= variables
    process = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(
    ("project", "beside"),
    [
        (LIBRARY, {f"comfy_sage2-{__version__}.dist-info"}),
        (SAGEATTENTION, {"comfy_sage2_sageattention.pth", f"comfy_sage2_sageattention-{__version__}.dist-info"}),
    ],
    ids=["library", "sageattention"],
)
def test_a_wheel_holds_the_library_its_kernels_and_nothing_else(
    wheel_of: Callable[[Path], Path], project: Path, beside: set[str]
) -> None:
    names = zipfile.ZipFile(wheel_of(project)).namelist()
    assert {name.split("/")[0] for name in names} == {"comfy_sage2", *beside}
    assert "comfy_sage2/py.typed" in names
    kernels = {name.removeprefix("comfy_sage2/wheels/") for name in names if name.startswith("comfy_sage2/wheels/")}
    assert kernels == {path.name for path in (ROOT / "wheels").iterdir()}
    # From a clone that was used before, force-include also takes the unpacked modules.
    unpacked = [name for name in names if "_unpacked" in name and project is LIBRARY]
    assert not [*unpacked, *(name for name in names if "__pycache__" in name)]


def test_the_installed_library_finds_its_kernels(site_of: Callable[[Path], Path]) -> None:
    site = site_of(LIBRARY)
    library, wheels, *architectures = run(site, SHOW).splitlines()
    assert Path(library).is_relative_to(site) and Path(wheels) == site / "comfy_sage2" / "wheels"
    assert architectures == ["sm120", "sm80", "sm89", "sm90"]


def test_the_module_serves_calls(site_of: Callable[[Path], Path]) -> None:
    site = site_of(SAGEATTENTION)
    printed = run(site, CALL, **REFERENCE)
    assert "close: True" in printed
    assert f"version: 2.2.0+comfy.sage2 {__version__}" in printed
    assert f"library: {site / 'comfy_sage2' / '__init__.py'}" in printed


def test_without_kernels_the_module_is_missing(site_of: Callable[[Path], Path]) -> None:
    code = "try:\n    import sageattention\nexcept ModuleNotFoundError as error:\n    print(error.name, error)\n"
    assert "sageattention [SA-601]" in run(site_of(SAGEATTENTION), code, CUDA_VISIBLE_DEVICES="")


def test_find_spec_does_not_import_torch(site_of: Callable[[Path], Path]) -> None:
    """torch could start CUDA, which processes that the host forks later could not use."""
    look = "print(importlib.util.find_spec('sageattention').name, 'torch' in sys.modules)\n"
    assert "sageattention False" in run(site_of(SAGEATTENTION), look)
