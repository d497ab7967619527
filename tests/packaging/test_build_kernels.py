"""A development build of a kernel package from the images of a wheel, without nvcc."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from tools import kernel_table

pytest.importorskip("pybind11", reason="the launch code is compiled with pybind11's headers")

from tools import build_kernels


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with an image under the name of each of sm90's, on a machine without nvcc."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    path = tmp_path / "images.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("comfy_sage2_sm90/__init__.py", "")
        for cubin in kernel_table.read("sm90").cubins:
            archive.writestr(f"comfy_sage2_sm90/{cubin.name}.cubin.xz", cubin.name)
        archive.writestr("comfy_sage2_sm90/build.json", '{"said": 1}')
    return path


def test_a_development_build_takes_the_images_of_a_wheel(images: Path, tmp_path: Path) -> None:
    stale = tmp_path / "out" / "comfy_sage2_sm90" / "old.cubin"
    stale.parent.mkdir(parents=True)
    stale.touch()
    package = build_kernels.build("sm90", None, tmp_path / "out", python=None, images=images, jobs=1)
    assert {path.name: path.read_text() for path in package.glob("*.cubin*")} == {
        f"{cubin.name}.cubin.xz": cubin.name for cubin in kernel_table.read("sm90").cubins
    }
    assert (package / "__init__.py").is_file()
    assert json.loads((package / "build.json").read_text()) == {"said": 1}
