"""Reading a kernel wheel: the module of this Python out of several, and a reason for whatever is wrong with it."""

from __future__ import annotations

import importlib.machinery
import io
import json
import lzma
import random
import tracemalloc
import zipfile
from collections.abc import Mapping

import pytest

from comfy_sage2.kernels import contents
from comfy_sage2.kernels.errors import KernelUnavailable
from tools.wheels import packed_modules

OWN = "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]
OTHERS = ("_C.cpython-27-x86_64-linux-gnu.so", "_C.cp27-win_amd64.pyd")
IMAGE = b"a device image" * 100
BUILD = b'{"abi_version": 5}'


def _wheel(files: Mapping[str, bytes], part: str = "sm90") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"comfy_sage2_{part}/{name}", content)
    return file.getvalue()


def _images(build: bytes = BUILD, image: bytes | None = None) -> bytes:
    packed = lzma.compress(IMAGE) if image is None else image
    return _wheel({"build.json": build, "attention_d64.cubin.xz": packed, "other.txt": b"not an image"})


def _host(**changed: bytes) -> bytes:
    """A wheel of modules that are packed as one, with another modules.xz or modules.json."""
    modules = {f"p/{name}": name.encode() * (10 + place) for place, name in enumerate((OTHERS[0], OWN, OTHERS[1]))}
    packed = {name.removeprefix("p/"): content for name, content in packed_modules.pack("p", modules).items()}
    return _wheel({**packed, **{name.replace("_", "."): content for name, content in changed.items()}}, "host")


def test_a_wheel_of_images_says_what_they_are() -> None:
    images = contents.read_images(_images(), "a.whl", "sm90")
    assert images.build == {"abi_version": 5} and images.cubins == {"attention_d64": IMAGE}


def test_a_host_wheel_gives_the_module_of_this_python() -> None:
    assert contents.read_host(_host(), "a.whl") == contents.HostModule(OWN, OWN.encode() * 11)


def test_the_one_kind_of_wheel_is_not_the_other() -> None:
    with pytest.raises(
        KernelUnavailable, match=r"is not a wheel of sm90 kernels: .* got no build\.json and 0 such files"
    ):
        contents.read_images(_host(), "a.whl", "sm90")
    with pytest.raises(KernelUnavailable, match="is not a wheel of host modules"):
        contents.read_host(_images(), "a.whl")


@pytest.mark.parametrize("bytes_left", [0, 10, 0.3, 0.9])
def test_a_truncated_wheel_is_named(bytes_left: float) -> None:
    wheel = _images()
    kept = int(bytes_left if bytes_left >= 1 else bytes_left * len(wheel))
    with pytest.raises(KernelUnavailable, match=r"a\.whl is not a readable wheel"):
        contents.read_images(wheel[:kept], "a.whl", "sm90")


def test_a_damaged_image_is_named() -> None:
    with pytest.raises(KernelUnavailable, match=r"attention_d64\.cubin\.xz is damaged"):
        contents.read_images(_images(image=b"no xz file"), "a.whl", "sm90")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (b"{", r"build\.json of a\.whl is damaged: "),
        (b"[1]", r"build\.json of a\.whl is damaged: it is no JSON object"),
        (b"\xff", r"build\.json of a\.whl is damaged: "),
        (b"[" * 100_000, r"build\.json of a\.whl is damaged: "),
    ],
)
def test_a_damaged_description_is_named(build: bytes, reason: str) -> None:
    with pytest.raises(KernelUnavailable, match=reason):
        contents.read_images(_images(build), "a.whl", "sm90")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"a.cubin.xz": lzma.compress(IMAGE)}, r"got no build\.json and 1 such files"),
        ({"build.json": BUILD}, r"got build\.json and 0 such files"),
    ],
)
def test_images_and_their_description_come_together(files: dict[str, bytes], found: str) -> None:
    with pytest.raises(KernelUnavailable, match=found):
        contents.read_images(_wheel(files), "a.whl", "sm90")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"modules_json": b"[]"}, "it is no JSON object"),
        ({"modules_json": b"{}"}, "is not a wheel of host modules"),
        ({"modules_json": f'{{"{OWN}": 7}}'.encode()}, "the sizes in modules.json are not those"),
        ({"modules_json": f'{{"{OWN}": -7, "a": 10}}'.encode()}, "the sizes in modules.json are not those"),
        (
            {"modules_json": f'{{"{OWN}": true}}'.encode(), "modules_xz": lzma.compress(b"a")},
            "the sizes in modules.json are not",
        ),
        ({"modules_json": f'{{"{OWN}": 1e400}}'.encode()}, "the sizes in modules.json are not those"),
        ({"modules_json": b'{"_C.cp27-win_amd64.pyd": 7}'}, r"has no module for .* it has _C\.cp27-win_amd64\.pyd"),
        ({"modules_xz": b"no xz file"}, "modules.xz is damaged"),
        ({"modules_xz": lzma.compress(b"a" * 1000)[:50]}, "modules.xz is damaged: it ends before"),
        ({"modules_xz": lzma.compress(bytes(300 * 1024 * 1024))}, "it holds more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_damaged_archives_of_modules_are_refused(changed: dict[str, bytes], reason: str) -> None:
    with pytest.raises(KernelUnavailable, match=reason):
        contents.read_host(_host(**changed), "a.whl")


def _megabytes(count: int) -> bytes:
    return lzma.compress(bytes(count * 1024 * 1024))


@pytest.mark.parametrize(
    "files",
    [
        {"a.cubin.xz": _megabytes(300)},
        {f"{index}.cubin.xz": _megabytes(60) for index in range(5)},
        {"build.json": bytes(300 * 1024 * 1024)},
    ],
    ids=["one image", "several", "deflate"],
)
def test_a_wheel_that_unpacks_to_more_than_there_can_be_is_refused(files: dict[str, bytes]) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"build.json": BUILD, **files}.items():
            archive.writestr(f"comfy_sage2_sm90/{name}", content)
    tracemalloc.start()
    with pytest.raises(KernelUnavailable, match=r"a\.whl is refused: it holds more than 268,435,456 bytes, with "):
        contents.read_images(file.getvalue(), "a.whl", "sm90")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 600 * 1024 * 1024


def test_a_size_that_is_a_lie_is_not_believed() -> None:
    """A file that unpacks to more than its archive says: no more of it is unpacked, and its checksum is wrong."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("comfy_sage2_sm90/build.json", bytes(50 * 1024 * 1024))
    wheel = bytearray(file.getvalue())
    for signature, field in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = wheel.rindex(signature, 0, wheel.rindex(b"PK\x05\x06")) if field == 24 else wheel.rindex(signature)
        wheel[place + field : place + field + 4] = (1000).to_bytes(4, "little")
    with pytest.raises(KernelUnavailable, match=r"a\.whl is not a readable wheel: "):
        contents.read_images(bytes(wheel), "a.whl", "sm90")


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_than_those_of_wheels_are_refused(compression: int) -> None:
    """Python unpacks them without a limit, and where they are damaged lzma raises an error of its own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("comfy_sage2_sm90/build.json", BUILD)
        archive.writestr("comfy_sage2_sm90/a.cubin.xz", lzma.compress(IMAGE))
    place = file.getvalue().index(b"build.json") + len("build.json") + 9  # behind what says how it was packed
    for content in (file.getvalue(), file.getvalue()[:place] + b"\xff" * 8 + file.getvalue()[place + 8 :]):
        with pytest.raises(KernelUnavailable, match=rf"build\.json is compressed by method {compression}, which"):
            contents.read_images(content, "a.whl", "sm90")


def test_a_wheel_of_many_files_is_refused() -> None:
    with pytest.raises(KernelUnavailable, match=r"it holds 2,001 files, at most 1,000 are expected"):
        contents.read_images(_wheel({f"{index}.txt": b"" for index in range(2001)}), "a.whl", "sm90")


def test_a_long_name_is_shortened() -> None:
    with pytest.raises(KernelUnavailable) as raised:
        contents.read_host(_host(modules_json=json.dumps({"a" * 30_000: 7}).encode()), "a.whl")
    assert len(str(raised.value)) < 500


def test_a_python_without_lzma_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lzma", None)
    with pytest.raises(KernelUnavailable, match="built without the standard module lzma"):
        contents.read_images(_images(), "a.whl", "sm90")


def test_random_damage_ends_in_a_reason(fresh_seed: int) -> None:
    generator = random.Random(fresh_seed)
    wheels, damaged = (_images(), _host()), 0
    for attempt in range(2000):
        content = bytearray(wheels[attempt % 2])
        for _ in range(generator.randint(1, 8)):
            content[generator.randrange(len(content))] = generator.randrange(256)
        try:
            if attempt % 2:
                contents.read_host(bytes(content), "a.whl")
            else:
                contents.read_images(bytes(content), "a.whl", "sm90")
        except KernelUnavailable:
            damaged += 1
    assert damaged > 100
