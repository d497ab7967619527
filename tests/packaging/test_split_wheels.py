"""One wheel for each platform from parts of the test's making, one for each CPython."""

from __future__ import annotations

import base64
import csv
import hashlib
import zipfile
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from tools.wheels.platform_wheels import PythonWheel, merge

LINUX = {"module": "_C.cpython-{}-x86_64-linux-gnu.so", "wheel_tag": "manylinux_2_17_x86_64"}
WINDOWS = {"module": "_C.cp{}-win_amd64.pyd", "wheel_tag": "win_amd64"}
PACKAGE, INFORMATION = "comfy_sage2_sm99", "comfy_sage2_sm99-1.2.3.dist-info"


def make_part(
    folder: Path, number: str, image: bytes = b"an image", platforms: tuple[dict[str, str], ...] = ()
) -> PythonWheel:
    path = folder / f"{PACKAGE}-1.2.3-cp{number}-cp{number}-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{PACKAGE}/__init__.py", "x = 1\n")
        archive.writestr(f"{PACKAGE}/a.cubin.xz", image)
        for platform in platforms or (LINUX, WINDOWS):
            name = platform["module"].format(number)
            archive.writestr(f"{PACKAGE}/{name}", f"the module {name}")
        wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp{number}-cp{number}-linux_x86_64\n"
        archive.writestr(f"{INFORMATION}/WHEEL", wheel)
        archive.writestr(f"{INFORMATION}/METADATA", "Name: comfy-sage2-sm99\nVersion: 1.2.3\n")
        archive.writestr(f"{INFORMATION}/RECORD", "")
    return PythonWheel.read(path)


@pytest.mark.parametrize("platform", [LINUX, WINDOWS], ids=["linux", "windows"])
def test_a_wheel_has_its_platforms_modules_and_one_set_of_images(tmp_path: Path, platform: dict[str, str]) -> None:
    wheel = merge([make_part(tmp_path, number) for number in ("39", "310")], platform, tmp_path)
    _, version, _, tags = parse_wheel_filename(wheel.name)
    assert str(version) == "1.2.3"
    wanted = {f"cp{number}-cp{number}-{platform['wheel_tag']}" for number in ("39", "310")}
    assert wanted <= {str(tag) for tag in tags}
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    modules = {platform["module"].format(number) for number in ("39", "310")}
    assert {name for name in files if name.startswith(PACKAGE + "/")} == {
        f"{PACKAGE}/{name}" for name in {"__init__.py", "a.cubin.xz", *modules}
    }
    assert all(files[f"{PACKAGE}/{name}"] == f"the module {name}".encode() for name in modules)
    said = files[f"{INFORMATION}/WHEEL"].decode().splitlines()
    assert {line for line in said if line.startswith("Tag: ")} == {f"Tag: {tag}" for tag in wanted}
    assert "Root-Is-Purelib: false" in said


def test_the_record_holds_the_hash_of_every_file(tmp_path: Path) -> None:
    wheel = merge([make_part(tmp_path, "310")], LINUX, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        rows = list(csv.reader(archive.read(f"{INFORMATION}/RECORD").decode().splitlines()))
        assert [row[0] for row in rows[:-1]] == sorted(set(archive.namelist()) - {rows[-1][0]})
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={encoded}", len(content))
    assert rows[-1] == [f"{INFORMATION}/RECORD", "", ""]


def test_the_same_parts_give_the_same_bits(tmp_path: Path) -> None:
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made.append(merge([make_part(tmp_path / name, "310")], LINUX, tmp_path / name).read_bytes())
    assert made[0] == made[1]


def test_images_that_differ_between_the_cpythons_are_refused(tmp_path: Path) -> None:
    parts = [make_part(tmp_path, "310"), make_part(tmp_path, "311", b"another image")]
    with pytest.raises(ValueError, match=r"a\.cubin\.xz of comfy_sage2_sm99 differs between the CPythons"):
        merge(parts, LINUX, tmp_path)


def test_a_part_without_the_platforms_module_is_refused(tmp_path: Path) -> None:
    parts = [make_part(tmp_path, "310"), make_part(tmp_path, "311", platforms=(LINUX,))]
    with pytest.raises(ValueError, match=r"for cp311 lacks _C\.cp311-win_amd64\.pyd"):
        merge(parts, WINDOWS, tmp_path)


def test_a_wheel_of_several_cpythons_is_no_part(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name of a wheel for one CPython"):
        PythonWheel.read(tmp_path / "a-1-cp310.cp311-cp310.cp311-manylinux_2_17_x86_64.whl")
