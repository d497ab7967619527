"""The table of sources and the tools that stage, release and compare wheels."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tools import kernel_table
from tools.wheels import stage_package, verify_wheels


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up table with an architecture that has two images of one source."""
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
    assert architecture.family == "sm99"
    assert kernel_table.host_sources() == (*kernel_table.SHARED_SOURCES, "sm99/launch.cpp")
    assert architecture.defines == ("FAST=1",)
    assert architecture.ptxas_options == ("--level=3",)
    assert architecture.capabilities == ((9, 9), (10, 0))
    assert (architecture.modes, architecture.pv_accumulators) == (("8b",), ("fp32", "fp16"))
    assert architecture.minimum_driver == "525"
    assert architecture.target(None) == "sm_99a" and architecture.target("sm_99") == "sm_99"


def test_a_staged_tree_describes_its_architectures_to_cmake(tmp_path: Path) -> None:
    tree = stage_package.stage(["sm90", "sm80"], tmp_path / "tree")
    description = (tree / "kernels.cmake").read_text().splitlines()
    assert f"set(HOST_SOURCES {' '.join(kernel_table.host_sources())})" in description
    assert "kernel_cubin(sm90 sm_90a attention_d64 sm90/attention.cu -DHEAD_DIM=64)" in description
    half = "-DHEAD_DIM=64 -DINT4_SCORES=1 -DHALF_VALUES=1 -DMXFP8=0"
    assert f"kernel_cubin(sm80 sm_80 attention_d64 sm80/attention.cu {half})" in description
    project = (tree / "pyproject.toml").read_text()
    assert 'packages = ["src/comfy_sage2_host", "src/comfy_sage2_sm90", "src/comfy_sage2_sm80"]' in project
    assert "$" not in project and (tree / "csrc" / "binding.cpp").is_file()
    assert (tree / "src" / "comfy_sage2_host" / "__init__.py").is_file()
    build_info = json.loads((tree / "src" / "comfy_sage2_sm80" / "build.json").read_text())
    assert build_info["architecture"] == build_info["family"] == "sm80" and build_info["half_values"] is True
    assert build_info["abi_version"] == kernel_table.abi_version() and build_info["toolchain"].startswith("NVRTC 12.9")
    assert build_info["launch_interface"] == kernel_table.launch_interface("sm80") and build_info["capabilities"] == [
        [8, 0],
        [8, 6],
    ]


def test_assembler_options_reach_the_compiler(table: Path) -> None:
    lines = stage_package.cubin_lines(kernel_table.read("sm99"))
    assert "kernel_cubin(sm99 sm_99a a_wide sm99/a.cu -DWIDTH=2 -DFAST=1 --ptxas-options=--level=3)" in lines


def test_cmake_and_a_development_build_give_the_host_module_the_same_definitions(tmp_path: Path) -> None:
    """families.cpp and binding.cpp take their definitions from either."""
    sources = [(kernel_table.CSRC / source).read_text() for source in kernel_table.SHARED_SOURCES]
    taken = {name for source in sources for name in re.findall(r"\b(?:HOST_TOOLCHAIN|\w+_LAUNCH_INTERFACE)\b", source)}
    assert kernel_table.host_defines("a test").keys() == taken
    cmake = (stage_package.stage(["sm90"], tmp_path / "tree") / "kernels.cmake").read_text()
    assert set(re.findall(r'"-D(\w+)=', cmake)) == taken


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of csrc/ that the test may change."""
    shutil.copytree(kernel_table.CSRC, tmp_path / "csrc")
    monkeypatch.setattr(kernel_table, "CSRC", tmp_path / "csrc")
    return tmp_path / "csrc"


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("sm90/params.h", {"sm90"}),
        ("sm80/launch.cpp", {"sm80"}),
        ("common/views.h", {"sm80", "sm90"}),
        ("sm90/attention.cuh", set()),
        ("binding.cpp", set()),
    ],
)
def test_the_launch_interface_covers_the_launch_code(sources: Path, file: str, changed: set[str]) -> None:
    before = {family: kernel_table.launch_interface(family) for family in kernel_table.families()}
    path = sources / file
    path.write_text(path.read_text() + "// a comment\n\n")
    assert {family: kernel_table.launch_interface(family) for family in before} == before
    path.write_text(path.read_text() + "int added;\n")
    differing = {family for family, interface in before.items() if kernel_table.launch_interface(family) != interface}
    assert differing == changed


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
