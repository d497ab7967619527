"""Reading a kernel wheel: the module of this Python out of several, and a reason for whatever is wrong with it."""

from __future__ import annotations

import importlib.machinery
import io
import lzma
import random
import zipfile

import pytest

from comfy_sage2.kernels import contents
from comfy_sage2.kernels.errors import KernelUnavailable

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
