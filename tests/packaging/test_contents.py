"""Reading a kernel wheel: the module of this Python out of several, and a reason for whatever is wrong with it."""

from __future__ import annotations

import importlib.machinery
import io
import lzma
import random
import tracemalloc
import zipfile

import pytest

from comfy_sage2.kernels import contents
from comfy_sage2.kernels.errors import KernelUnavailable
from tools.wheels import packed_modules

OWN = "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]
OTHERS = ("_C.cpython-27-x86_64-linux-gnu.so", "_C.cp27-win_amd64.pyd")
IMAGE = b"a device image" * 100


def _wheel(**files: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"comfy_sage2_sm90/{name}", content)
    return file.getvalue()


def _merged() -> bytes:
    modules = {name: name.encode() * 100 for name in (OWN, *OTHERS)}
    return _wheel(**modules, **{"attention_d64.cubin.xz": lzma.compress(IMAGE)})


def test_the_module_of_this_python_is_taken_out_of_several() -> None:
    files = contents.read(_merged(), "a.whl", "sm90")
    assert files.extension_name == OWN and files.extension == OWN.encode() * 100
    assert files.cubins == {"attention_d64": IMAGE}


def test_a_wheel_without_a_module_for_this_python_names_those_that_it_has() -> None:
    wheel = _wheel(**dict.fromkeys(OTHERS, b"module"), **{"a.cubin.xz": lzma.compress(IMAGE)})
    with pytest.raises(KernelUnavailable, match=r"a\.whl has no module for .* it has _C\.cp27-win_amd64\.pyd, _C\.cpy"):
        contents.read(wheel, "a.whl", "sm90")


@pytest.mark.parametrize("bytes_left", [0, 10, 0.3, 0.9])
def test_a_truncated_wheel_is_named(bytes_left: float) -> None:
    wheel = _merged()
    kept = int(bytes_left if bytes_left >= 1 else bytes_left * len(wheel))
    with pytest.raises(KernelUnavailable, match=r"a\.whl is not a readable wheel"):
        contents.read(wheel[:kept], "a.whl", "sm90")


def test_a_damaged_image_is_named() -> None:
    wheel = _wheel(**{OWN: b"module", "a.cubin.xz": b"no xz file"})
    with pytest.raises(KernelUnavailable, match=r"a\.cubin\.xz is damaged"):
        contents.read(wheel, "a.whl", "sm90")


def test_a_wheel_of_images_says_what_they_are() -> None:
    wheel = _wheel(**{"build.json": b'{"abi_version": 5}', "a.cubin.xz": lzma.compress(IMAGE), "b.cubin": b"plain"})
    files = contents.read(wheel, "a.whl", "sm90")
    assert files.extension is None and files.build == {"abi_version": 5}
    assert files.cubins == {"a": IMAGE, "b": b"plain"}


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
        contents.read(_wheel(**{"build.json": build, "a.cubin": IMAGE}), "a.whl", "sm90")


def test_images_without_a_description_or_a_module_are_refused() -> None:
    with pytest.raises(KernelUnavailable, match=r"got 1 cubins, no build\.json and no module"):
        contents.read(_wheel(**{"a.cubin": IMAGE}), "a.whl", "sm90")


def test_a_host_wheel_gives_the_module_of_this_python() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in (OWN, *OTHERS):
            archive.writestr(f"comfy_sage2_host/{name}", name)
    files = contents.read(file.getvalue(), "a.whl", "host")
    assert (files.extension_name, files.extension) == (OWN, OWN.encode())
    with pytest.raises(KernelUnavailable, match="is not a wheel of host modules"):
        contents.read(_merged(), "a.whl", "host")


def _host(sizes: bytes | None = None, archive: bytes | None = None) -> bytes:
    """A wheel of modules that are packed as one, with other sizes or another archive."""
    package, names = "comfy_sage2_host", (OTHERS[0], OWN, OTHERS[1])
    modules = {f"{package}/{name}": name.encode() * (10 + place) for place, name in enumerate(names)}
    files = packed_modules.pack(package, modules)
    for name, content in ((packed_modules.SIZES, sizes), (packed_modules.ARCHIVE, archive)):
        if content is not None:
            files[f"{package}/{name}"] = content
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return file.getvalue()


def test_modules_packed_as_one_give_that_of_this_python() -> None:
    files = contents.read(_host(), "a.whl", "host")
    assert (files.extension_name, files.extension) == (OWN, OWN.encode() * 11)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sizes": b"[]"}, "it is no JSON object"),
        ({"sizes": b"{}"}, "is not a wheel of host modules"),
        ({"sizes": f'{{"{OWN}": 7}}'.encode()}, "the sizes in modules.json are not those"),
        ({"sizes": f'{{"{OWN}": -7, "a": 10}}'.encode()}, "the sizes in modules.json are not those"),
        ({"sizes": f'{{"{OWN}": true}}'.encode(), "archive": lzma.compress(b"a")}, "the sizes in modules.json are not"),
        ({"sizes": f'{{"{OWN}": 1e400}}'.encode()}, "the sizes in modules.json are not those"),
        ({"sizes": b'{"_C.cp27-win_amd64.pyd": 7}'}, r"has no module for .* it has _C\.cp27-win_amd64\.pyd"),
        ({"archive": b"no xz file"}, "modules.xz is damaged"),
        ({"archive": lzma.compress(b"a" * 1000)[:50]}, "modules.xz is damaged: it ends before"),
        ({"archive": lzma.compress(bytes(300 * 1024 * 1024))}, "it holds more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_damaged_archives_of_modules_are_refused(changed: dict[str, bytes], reason: str) -> None:
    with pytest.raises(KernelUnavailable, match=reason):
        contents.read(_host(**changed), "a.whl", "host")


def _megabytes(count: int) -> bytes:
    return bytes(count * 1024 * 1024)


@pytest.mark.parametrize(
    "files",
    [
        {"a.cubin.xz": lzma.compress(_megabytes(300))},
        {"a.cubin": _megabytes(300)},
        {f"{index}.cubin": _megabytes(60) for index in range(5)},
        {f"{index}.cubin.xz": lzma.compress(_megabytes(60)) for index in range(5)},
    ],
    ids=["xz", "deflate", "several", "several xz"],
)
def test_a_wheel_that_unpacks_to_more_than_there_can_be_is_refused(files: dict[str, bytes]) -> None:
    wheel = _wheel(**{OWN: b"module"}, **files)
    tracemalloc.start()
    with pytest.raises(KernelUnavailable, match=r"a\.whl is refused: it holds more than 268,435,456 bytes, with "):
        contents.read(wheel, "a.whl", "sm90")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 600 * 1024 * 1024


def test_a_size_that_is_a_lie_is_not_believed() -> None:
    """A file that unpacks to more than its archive says: no more of it is unpacked, and its checksum is wrong."""
    wheel = bytearray(_wheel(**{OWN: b"module", "a.cubin": _megabytes(50)}))
    for signature, field in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = wheel.rindex(signature, 0, wheel.rindex(b"PK\x05\x06")) if field == 24 else wheel.rindex(signature)
        wheel[place + field : place + field + 4] = (1000).to_bytes(4, "little")
    with pytest.raises(KernelUnavailable, match=r"a\.whl is not a readable wheel: "):
        contents.read(bytes(wheel), "a.whl", "sm90")


def test_a_wheel_of_many_files_is_refused() -> None:
    with pytest.raises(KernelUnavailable, match=r"it holds 2,001 files, at most 1,000 are expected"):
        contents.read(_wheel(**{f"{index}.txt": b"" for index in range(2001)}), "a.whl", "sm90")


def test_a_long_name_is_shortened() -> None:
    with pytest.raises(KernelUnavailable) as raised:
        contents.read(_wheel(**{"a" * 30_000 + ".so": b"module", "a.cubin": IMAGE}), "a.whl", "sm90")
    assert len(str(raised.value)) < 500


def test_a_python_without_lzma_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lzma", None)
    with pytest.raises(KernelUnavailable, match="built without the standard module lzma"):
        contents.read(_merged(), "a.whl", "sm90")


def test_random_damage_ends_in_a_reason(fresh_seed: int) -> None:
    generator = random.Random(fresh_seed)
    wheel, damaged = _merged(), 0
    for _ in range(2000):
        content = bytearray(wheel)
        for _ in range(generator.randint(1, 8)):
            content[generator.randrange(len(content))] = generator.randrange(256)
        try:
            contents.read(bytes(content), "a.whl", "sm90")
        except KernelUnavailable:
            damaged += 1
    assert damaged > 100
