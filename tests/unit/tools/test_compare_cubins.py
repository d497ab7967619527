"""tools/compare_cubins.py on an image of the bundled wheels, and on copies of it with one change."""

from __future__ import annotations

import lzma
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tools import compare_cubins

WHEELS = Path(__file__).resolve().parents[3] / "wheels"
KERNEL = "prepare_tile_lists"


def _wheel(architecture: str) -> Path:
    return next(WHEELS.glob(f"comfy_sage2_{architecture}-*.whl"))


@cache
def _image() -> bytes:
    with zipfile.ZipFile(_wheel("sm90")) as wheel:
        return lzma.decompress(wheel.read("comfy_sage2_sm90/tile_lists.cubin.xz"))


def _with_bit_flipped(content: bytes) -> bytes:
    """The image with one bit flipped in the middle of `content`, which it contains once."""
    assert _image().count(content) == 1
    changed = bytearray(_image())
    changed[_image().index(content) + len(content) // 2] ^= 1
    return bytes(changed)


def _differences(before: bytes, after: bytes) -> list[str]:
    return compare_cubins.differences(compare_cubins.kernels_of(before), compare_cubins.kernels_of(after))


def test_a_changed_instruction_is_found() -> None:
    code = compare_cubins.kernels_of(_image())[KERNEL].parts[".text"]
    assert isinstance(code, bytes)
    assert _differences(_image(), _with_bit_flipped(code)) == [f"{KERNEL}: .text ({len(code)} -> {len(code)} bytes)"]


def test_a_changed_number_of_registers_is_found() -> None:
    registers = compare_cubins.kernels_of(_image())[KERNEL].registers
    changed = bytearray(_image())
    numbers = [
        at for at in range(len(changed)) if changed[at : at + 4] == b"\x04\x2f\x08\x00" and changed[at + 8] == registers
    ]
    assert len(numbers) == 1
    changed[numbers[0] + 8] = 99
    (line,) = _differences(_image(), bytes(changed))
    assert line == f"{KERNEL}: registers {registers} -> 99, attribute 0x2f (4 -> 4 bytes)"


def test_changed_symbol_numbers_are_ignored() -> None:
    """The numbers also count the image's unused constants. Here the number of a kernel's parameter bank changes."""
    changed = bytearray(_image())
    record = b"\x04\x0a\x08\x00"
    assert changed.count(record) == 2
    changed[changed.index(record) + len(record)] ^= 1
    assert _differences(_image(), bytes(changed)) == []


def test_a_kernel_in_only_one_build_is_named() -> None:
    renamed = _image().replace(b"clear_dead_tiles", b"clear_other_name")
    assert _differences(_image(), renamed) == [
        "clear_dead_tiles: in the first build alone",
        "clear_other_name: in the second build alone",
    ]


def test_every_kind_of_build_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wheel, a folder with plain or packed images, and a single image."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tile_lists.cubin").write_bytes(_image())
    packed = tmp_path / "tile_lists.cubin.xz"
    packed.write_bytes(lzma.compress(_image()))
    assert compare_cubins.main([str(tmp_path / "plain"), str(packed)]) == 0
    assert capsys.readouterr().out == "2 kernels are in both builds; differences: 0\n"
    assert compare_cubins.main([str(packed), str(_wheel("sm90"))]) == 1
    assert "attention_d64/attention_d64: in the second build alone" in capsys.readouterr().out
