"""The table of sources and the tools that stage, release and compare wheels."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tools import build_kernels, kernel_table
from tools.wheels import stage_package, verify_wheels


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of the test's own, with one architecture that has two images of one source."""
    path = tmp_path / "architectures.json"
    cubins = {"a": {"source": "sm99/a.cu"}, "a_wide": {"source": "sm99/a.cu", "defines": {"WIDTH": 2}}}
    families = {
        "sm99": {"host_sources": ["sm99/launch.cpp"], "cubins": cubins},
        "sm98": {"host_sources": [], "cubins": {}},
    }
    entry = {
        "family": "sm99",
        "hardware": "a GPU of the test",
        "capabilities": ["9.9", "10.0"],
        "modes": ["8b"],
        "pv_formats": ["fp8"],
        "pv_accumulators": ["fp32", "fp16"],
        "minimum_driver": "525",
        "targets": ["sm_99a", "sm_99"],
        "cubins": {"of_family": {"source": "sm99/a.cu", "targets": {"sm_99a": "sm_99f"}}},
        "defines": {"FAST": 1},
        "ptxas_options": ["--level=3"],
    }
    architectures = {"sm99": entry, "sm98": {**entry, "family": "sm98", "cubins": {}}}
    path.write_text(json.dumps({"families": families, "architectures": architectures}))
    monkeypatch.setattr(kernel_table, "TABLE", path)
    return path


def test_the_table_gives_cubins_and_host_sources(table: Path) -> None:
    architecture = kernel_table.read("sm99")
    assert [(cubin.name, cubin.source, cubin.defines) for cubin in architecture.cubins] == [
        ("a", "sm99/a.cu", ("FAST=1",)),
        ("a_wide", "sm99/a.cu", ("WIDTH=2", "FAST=1")),
        ("of_family", "sm99/a.cu", ("FAST=1",)),
    ]
    targets = [[cubin.target(target) for target in architecture.targets] for cubin in architecture.cubins]
    assert targets == [["sm_99a", "sm_99"], ["sm_99a", "sm_99"], ["sm_99f", "sm_99"]]
    assert architecture.host_sources == ("build_info.cpp", "sm99/launch.cpp")
    assert architecture.defines == ("FAST=1",)
    assert architecture.ptxas_options == ("--level=3",)
    assert architecture.capabilities == ((9, 9), (10, 0))
    assert (architecture.modes, architecture.pv_accumulators) == (("8b",), ("fp32", "fp16"))
    assert architecture.minimum_driver == "525"
    assert architecture.target(None) == "sm_99a" and architecture.target("sm_99") == "sm_99"


def test_what_the_table_lacks_is_named(table: Path) -> None:
    with pytest.raises(ValueError, match="architecture must be one of sm99, sm98, got sm42"):
        kernel_table.read("sm42")
    with pytest.raises(ValueError, match="sm99 has the targets sm_99a, sm_99, got sm_70"):
        kernel_table.read("sm99").target("sm_70")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("families", "sm99", "cubins", "a"), r"unknown keys \['define'\] in the cubin a"),
        (("families", "sm99"), r"unknown keys \['define'\] in the family sm99"),
        (("architectures", "sm99"), r"unknown keys \['define'\] in sm99"),
    ],
)
def test_a_misspelled_key_is_refused(table: Path, place: tuple[str, ...], message: str) -> None:
    content = json.loads(table.read_text())
    entry = content
    for key in place:
        entry = entry[key]
    entry["define"] = {}
    table.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        kernel_table.read("sm99")


def test_a_missing_key_is_refused(table: Path) -> None:
    content = json.loads(table.read_text())
    del content["architectures"]["sm99"]["modes"]
    table.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"missing keys \['modes'\] in sm99"):
        kernel_table.read("sm99")


def test_every_listed_source_is_there() -> None:
    for name in kernel_table.names():
        architecture = kernel_table.read(name)
        for source in (
            *kernel_table.SHARED_SOURCES,
            *architecture.host_sources,
            *(cubin.source for cubin in architecture.cubins),
        ):
            assert (kernel_table.CSRC / source).is_file(), source


def test_a_staged_tree_describes_its_architecture_to_cmake(table: Path, tmp_path: Path) -> None:
    tree = stage_package.stage("sm99", tmp_path / "tree")
    description = (tree / "architecture.cmake").read_text().splitlines()
    assert "set(KERNEL_TARGET sm_99a)" in description
    assert "set(SHARED_SOURCES binding.cpp block_selection.cpp driver.cpp launch_list.cpp plan.cpp)" in description
    assert "set(HOST_SOURCES build_info.cpp sm99/launch.cpp)" in description
    assert "set(HOST_DEFINES FAST=1)" in description
    assert "set(KERNEL_MODES 8b)" in description and "set(KERNEL_PV_ACCUMULATORS fp32,fp16)" in description
    assert "set(KERNEL_CAPABILITIES 9.9,10.0)" in description
    assert "kernel_cubin(of_family sm99/a.cu sm_99f -DFAST=1 --ptxas-options=--level=3)" in description
    assert "kernel_cubin(a_wide sm99/a.cu sm_99a -DWIDTH=2 -DFAST=1 --ptxas-options=--level=3)" in description
    project = (tree / "pyproject.toml").read_text()
    assert 'name = "comfy-sage2-sm99"' in project and "$" not in project
    assert (tree / "src" / "comfy_sage2_sm99" / "__init__.py").is_file() and (tree / "csrc" / "binding.cpp").is_file()


def test_cmake_and_a_development_build_tell_a_module_the_same(table: Path, tmp_path: Path) -> None:
    """csrc/build_info.cpp takes its definitions of either."""
    taken = set(re.findall(r"\bKERNEL_\w+", (kernel_table.CSRC / "build_info.cpp").read_text()))
    cmake = (kernel_table.CSRC.parent / "packages" / "kernels" / "CMakeLists.txt").read_text()
    assert set(re.findall(r"-D(KERNEL_\w+)", cmake)) == taken
    info = kernel_table.build_info(kernel_table.read("sm99"), target="sm_99", toolchain="a test", driver="570")
    assert info.keys() == taken
    assert info["KERNEL_MODES"] == '"8b"' and info["KERNEL_PV_ACCUMULATORS"] == '"fp32,fp16"'
    assert info["KERNEL_CAPABILITIES"] == '"9.9,10.0"' and info["KERNEL_MINIMUM_DRIVER_VERSION"] == "12080"


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with an image under the name of each of sm90's, on a machine without nvcc."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    path = tmp_path / "images.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("comfy_sage2_sm90/__init__.py", "")
        for cubin in kernel_table.read("sm90").cubins:
            archive.writestr(f"comfy_sage2_sm90/{cubin.name}.cubin.xz", cubin.name)
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


def test_the_images_of_another_architecture_are_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"images.whl must hold .*prepare_d64.cubin.xz.*, it holds .*one_pass.cubin.xz"
    ):
        build_kernels.build("sm89", None, tmp_path / "out", python=None, images=images, jobs=1)


def test_a_development_build_without_nvcc_says_what_helps(images: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nvcc is not on the PATH: .* or give --images"):
        build_kernels.build("sm90", None, tmp_path / "out", python=None, images=None, jobs=1)


def test_an_architecture_without_kernels_is_not_staged(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lists no device sources for sm98"):
        stage_package.stage("sm98", tmp_path / "tree")


def _wheel(path: Path, content: str, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(zipfile.ZipInfo("same"), "same")
        archive.writestr(zipfile.ZipInfo("changed"), content, compress_type=compression)
    return path


def test_a_rebuilt_wheel_is_compared_bit_for_bit(tmp_path: Path) -> None:
    released = _wheel(tmp_path / "released.whl", "a" * 100)
    assert verify_wheels.difference(released, _wheel(tmp_path / "again.whl", "a" * 100)) is None
    assert verify_wheels.difference(released, _wheel(tmp_path / "other.whl", "b")) == "these files differ: changed"
    packed = _wheel(tmp_path / "packed.whl", "a" * 100, zipfile.ZIP_DEFLATED)
    assert verify_wheels.difference(released, packed) == "the same files, packed differently"
