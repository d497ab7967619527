"""The released wheels, made from the test's own parts, one part for each CPython."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from tools.wheels import packed_modules, split_wheels

LINUX = {"module": "_C.cpython-{}-x86_64-linux-gnu.so", "wheel_tag": "manylinux_2_17_x86_64"}
WINDOWS = {"module": "_C.cp{}-win_amd64.pyd", "wheel_tag": "win_amd64"}
HOST, IMAGES = "comfy_sage2_host", "comfy_sage2_sm90"


def make_part(
    folder: Path,
    number: str,
    image: bytes = b"an image",
    platforms: tuple[dict[str, str], ...] = (LINUX, WINDOWS),
    architectures: tuple[str, ...] = ("sm90", "sm120"),
) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"comfy_sage2_kernels-1.2.3-cp{number}-cp{number}-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{HOST}/__init__.py", "x = 1\n")
        for platform in platforms:
            name = platform["module"].format(number)
            archive.writestr(f"{HOST}/{name}", f"the module {name}")
        for architecture in architectures:
            archive.writestr(f"comfy_sage2_{architecture}/a.cubin.xz", image)
            archive.writestr(f"comfy_sage2_{architecture}/build.json", "{}")
        archive.writestr("comfy_sage2_kernels-1.2.3.dist-info/METADATA", "Name: comfy-sage2-kernels\n")
    return path


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(autouse=True)
def _two_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_wheels, "PLATFORMS", {"linux": LINUX, "windows": WINDOWS})
    monkeypatch.setattr(split_wheels, "check_old_systems", lambda wheel, tag: None)


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    """The made wheels, by file name."""
    parts = [make_part(tmp_path, number) for number in ("310", "39")]
    made = split_wheels.make(parts, tmp_path / "out", {HOST: "4.5.6", IMAGES: "1.2.3", "comfy_sage2_sm120": "1.2.0"})
    return {path.name: path for path in made}


def test_there_is_a_wheel_for_each_architecture_and_each_platform(wheels: dict[str, Path]) -> None:
    assert set(wheels) == {
        f"{IMAGES}-1.2.3-py3-none-any.whl", "comfy_sage2_sm120-1.2.0-py3-none-any.whl",
        f"{HOST}-4.5.6-py3-none-manylinux_2_17_x86_64.whl", f"{HOST}-4.5.6-py3-none-win_amd64.whl",
    }  # fmt: skip
    for name in wheels:
        _, _, _, tags = parse_wheel_filename(name)
        assert {str(tag) for tag in tags} == {name.split("-", 2)[2].removesuffix(".whl")}


@pytest.mark.parametrize("platform", [LINUX, WINDOWS], ids=["linux", "windows"])
def test_a_host_wheel_has_its_platforms_modules(wheels: dict[str, Path], platform: dict[str, str]) -> None:
    files = files_of(wheels[f"{HOST}-4.5.6-py3-none-{platform['wheel_tag']}.whl"])
    packed = {f"{HOST}/{name}" for name in ("__init__.py", "_C.py", "modules.xz", "modules.json")}
    assert {name for name in files if ".dist-info/" not in name} == packed
    modules = {f"{HOST}/{platform['module'].format(number)}" for number in ("39", "310")}
    unpacked = packed_modules.unpack(files)
    assert {name for name in unpacked if ".dist-info/" not in name} == {f"{HOST}/__init__.py", *modules}
    assert all(unpacked[name] == f"the module {name.rpartition('/')[2]}".encode() for name in modules)
    assert b"Root-Is-Purelib: false" in files[f"{HOST}-4.5.6.dist-info/WHEEL"]


def test_a_wheel_of_images_names_the_host_as_its_requirement(wheels: dict[str, Path], tmp_path: Path) -> None:
    wheel = wheels[f"{IMAGES}-1.2.3-py3-none-any.whl"]
    assert {name for name in files_of(wheel) if ".dist-info/" not in name} == {
        f"{IMAGES}/a.cubin.xz", f"{IMAGES}/build.json",
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (made,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert (made.name, made.version, made.requires) == ("comfy-sage2-sm90", "1.2.3", ["comfy-sage2-host<2,>=1"])
    assert made.metadata["Summary"].endswith("Hopper (H100, H200)") and made.read_text("licenses/LICENSE")


def test_the_same_parts_give_the_same_bits(tmp_path: Path) -> None:
    made = [split_wheels.make([make_part(tmp_path / name, "310")], tmp_path / name) for name in ("first", "second")]
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]


def test_images_that_differ_between_the_cpythons_are_refused(tmp_path: Path) -> None:
    parts = [make_part(tmp_path, "310"), make_part(tmp_path, "311", b"another image")]
    with pytest.raises(ValueError, match=r"comfy_sage2_sm120/a\.cubin\.xz differs between the CPythons"):
        split_wheels.make(parts, tmp_path / "out")


def test_a_part_without_the_platforms_module_is_refused(tmp_path: Path) -> None:
    parts = [make_part(tmp_path, "310"), make_part(tmp_path, "311", platforms=(LINUX,))]
    with pytest.raises(ValueError, match=rf"lacks {HOST}/_C\.cp311-win_amd64\.pyd"):
        split_wheels.make(parts, tmp_path / "out")
