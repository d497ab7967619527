"""Compare the machine code of every kernel in two builds of the device images.

    python -m tools.compare_cubins wheels/comfy_sage2_sm90-6.0.0-py3-none-any.whl build/kernels/comfy_sage2_sm90

Either side is an image (.cubin, or packed as .cubin.xz), a wheel, or a folder with images at any depth. Compares each
kernel's instructions, registers, barriers, stack, shared memory, constants and parameters. Whole files may differ:
NVRTC keeps unused constants of the source, with their names and addresses, beside the code.

Exits with 1 when a kernel differs or is in only one build. Both builds must come from the same compiler.
"""

from __future__ import annotations

import argparse
import lzma
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_TEXT = ".text."
_CONSTANTS = ".nv.constant"
_NO_BITS = 8  # sh_type of a section that takes no bytes in the file
# The section with attributes of all kernels. A record is a format and an attribute; format 4 adds a size and a symbol.
_ATTRIBUTES = ".nv.info"
_SIZED, _REGISTERS = 4, 0x2F
# In the attribute section of one kernel, the record with this start contains the symbol of the parameters' bank.
_OF_PARAMETERS = b"\x04\x0a\x08\x00"
# sh_flags of a kernel's code section contain its number of barriers.
_BARRIERS_SHIFT, _BARRIERS_MASK = 20, 0x7F
_SYMBOL_BYTES = 24
# Part of a relocation section's name -> struct format of an entry: offset, symbol and type, and in .rela an addend.
_RELOCATIONS = {".rela.": "<QQq", ".rel.": "<QQ"}

Part = int | bytes


@dataclass(frozen=True)
class Kernel:
    """One kernel as the driver loads it."""

    registers: int  # per thread
    barriers: int
    # The contents of its sections (sizes, where they take no bytes in the file), its attributes, and the constants that
    # all kernels of the image share.
    parts: dict[str, Part]

    def differences(self, other: Kernel) -> list[str]:
        """How the other kernel differs, in words."""
        differences = [
            f"{word} {before} -> {after}"
            for word in ("registers", "barriers")
            if (before := getattr(self, word)) != (after := getattr(other, word))
        ]
        for name in sorted(self.parts.keys() | other.parts.keys()):
            before, after = self.parts.get(name, b""), other.parts.get(name, b"")
            if before != after:
                sizes = [part if isinstance(part, int) else len(part) for part in (before, after)]
                differences.append(f"{name} ({sizes[0]} -> {sizes[1]} bytes)")
        return differences


@dataclass(frozen=True)
class _Section:
    name: str
    flags: int
    content: Part


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(image: bytes) -> dict[str, _Section]:
    if image[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, start + index * size) for index in range(count)]
    table = image[headers[names][4] : headers[names][4] + headers[names][5]]
    sections = {}
    for name_offset, kind, flags, _, offset, length, *_ in headers:
        name = _text(table, name_offset)
        content = image[offset : offset + length]
        if kind != _NO_BITS and len(content) != length:
            raise ValueError(f"the section {name} extends past the end of the file")
        sections[name] = _Section(name, flags, length if kind == _NO_BITS else content)
    return sections


def _content(sections: dict[str, _Section], name: str) -> bytes:
    section = sections.get(name)
    if section is None or isinstance(section.content, int):
        raise ValueError(f"no section {name}")
    return section.content


def _symbols(sections: dict[str, _Section]) -> list[str]:
    symbols, strings = _content(sections, ".symtab"), _content(sections, ".strtab")
    return [_text(strings, struct.unpack_from("<I", symbols, at)[0]) for at in range(0, len(symbols), _SYMBOL_BYTES)]


def _attributes(content: bytes, symbols: list[str]) -> dict[str, dict[int, bytes]]:
    """Kernel -> attribute -> value, from the section with attributes of all kernels."""
    records: dict[str, dict[int, bytes]] = {}
    at = 0
    while at < len(content):
        size = 0
        if content[at] == _SIZED:
            size, symbol = struct.unpack_from("<HI", content, at + 2)
            records.setdefault(symbols[symbol], {})[content[at + 1]] = content[at + 8 : at + 4 + size]
        at += 4 + size
    return records


def _without_symbol_numbers(attributes: bytes) -> bytes:
    """A kernel's own attributes without symbol numbers, which depend on the image's unused constants."""
    kept, at = bytearray(), 0
    while at < len(attributes):
        size = struct.unpack_from("<H", attributes, at + 2)[0] if attributes[at] == _SIZED else 0
        record = attributes[at : at + 4 + size]
        kept += record[:4] + record[8:] if record.startswith(_OF_PARAMETERS) else record
        at += len(record)
    return bytes(kept)


def _with_symbol_names(relocations: bytes, packing: str, symbols: list[str]) -> bytes:
    """A kernel's relocations as text, with symbol names in place of numbers."""
    lines = []
    for offset, symbol_and_type, *addend in struct.iter_unpack(packing, relocations):
        kind = symbol_and_type & 0xFFFFFFFF
        lines.append(f"{offset} {symbols[symbol_and_type >> 32]} {kind} {addend}")
    return "\n".join(lines).encode()


def _part(section: _Section, symbols: list[str]) -> Part:
    """The content of a kernel's section, in a form that is equal in all images with this kernel."""
    if isinstance(section.content, int):
        return section.content
    if section.name.startswith(f"{_ATTRIBUTES}."):
        return _without_symbol_numbers(section.content)
    packing = next((packing for part, packing in _RELOCATIONS.items() if part in section.name), None)
    return section.content if packing is None else _with_symbol_names(section.content, packing, symbols)


def kernels_of(image: bytes) -> dict[str, Kernel]:
    """Name -> kernel, of one device image. ValueError when `image` is not one, or is damaged."""
    try:
        return _kernels(_sections(image))
    except (struct.error, IndexError) as error:
        raise ValueError(f"a damaged device image: {error}") from error


def _kernels(sections: dict[str, _Section]) -> dict[str, Kernel]:
    symbols = _symbols(sections)
    attributes = _attributes(_content(sections, _ATTRIBUTES), symbols)
    names = [name.removeprefix(_TEXT) for name in sections if name.startswith(_TEXT)]
    # Skip banks with relocations: they hold addresses of the source's constants, which our code does not read there.
    shared = {
        section.name: section.content
        for section in sections.values()
        if section.name.startswith(_CONSTANTS)
        and section.name.count(".") == 2
        and not any(f".{kind}{section.name}" in sections for kind in ("rel", "rela"))
    }
    kernels = {}
    for kernel in names:
        kernel_attributes = attributes.get(kernel, {})
        if _REGISTERS not in kernel_attributes:
            raise ValueError(f"a damaged device image: the number of registers of {kernel} is missing")
        parts: dict[str, Part] = {f"attribute 0x{number:02x}": value for number, value in kernel_attributes.items()}
        parts |= {
            section.name.removesuffix(f".{kernel}"): _part(section, symbols)
            for section in sections.values()
            if section.name.endswith(f".{kernel}")
        }
        parts |= {f"common {name}": content for name, content in shared.items()}
        barriers = sections[_TEXT + kernel].flags >> _BARRIERS_SHIFT & _BARRIERS_MASK
        kernels[kernel] = Kernel(int.from_bytes(kernel_attributes[_REGISTERS], "little"), barriers, parts)
    return kernels


def _images(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each image of a build."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.namelist():
                if member.endswith(".cubin.xz"):
                    yield Path(member).name.removesuffix(".cubin.xz"), lzma.decompress(wheel.read(member))
        return
    files = [path] if path.is_file() else [*path.rglob("*.cubin"), *path.rglob("*.cubin.xz")]
    for file in files:
        content = file.read_bytes()
        yield file.name.partition(".")[0], lzma.decompress(content) if file.suffix == ".xz" else content


def build_of(path: Path) -> dict[str, Kernel]:
    """ "image/kernel" -> kernel, of a wheel, a folder or one image.

    FileNotFoundError when there is no image; ValueError when one is damaged, or when two images of the same name
    differ, as those of different architectures do.
    """
    kernels: dict[str, Kernel] = {}
    for image, content in _images(path):
        for name, kernel in kernels_of(content).items():
            if kernels.setdefault(f"{image}/{name}", kernel) != kernel:
                raise ValueError(f"{path} has two different images {image}: name the folder or the file of one")
    if not kernels:
        raise FileNotFoundError(f"no device image (.cubin or .cubin.xz) in {path}")
    return kernels


def differences(before: dict[str, Kernel], after: dict[str, Kernel]) -> list[str]:
    """A line for each kernel that differs between the builds."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"{name}: in the first build alone")
        elif name not in before:
            lines.append(f"{name}: in the second build alone")
        elif differences := before[name].differences(after[name]):
            lines.append(f"{name}: {', '.join(differences)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the machine code of every kernel in two builds.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    paths = parser.parse_args(arguments)
    before, after = build_of(paths.before), build_of(paths.after)
    lines = differences(before, after)
    print(
        *lines, f"{len(before.keys() & after.keys())} kernels are in both builds; differences: {len(lines)}", sep="\n"
    )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
