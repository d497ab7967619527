"""The structures that csrc's launch code passes to kernels, as its headers declare them."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from binding import CSRC

Structures = dict[str, type[Any]]  # by their names

_TYPES: Structures = {
    "int": ctypes.c_int32, "float": ctypes.c_float, "i64": ctypes.c_int64, "unsigned char": ctypes.c_uint8,
    "Rotates": ctypes.c_int32, "ListForm": ctypes.c_int32,
    "Strided": ctypes.c_int64 * 4,  # the pointer, and strides of batch, head and token
}  # fmt: skip


def structures(*headers: str) -> Structures:
    """The structures of these headers in csrc/; pointers become integers."""
    known = dict(_TYPES)
    for header in headers:
        text = re.sub(r"//.*", "", (CSRC / header).read_text(encoding="utf-8"))
        text = re.sub(r"template <.*?\n\};", "", text, flags=re.DOTALL)
        for constant, value in re.findall(r"constexpr int (\w+) = (\d+);", text):
            text = text.replace(f"[{constant}]", f"[{value}]")
        for name, base, body in re.findall(r"struct (?:alignas\(\d+\) )?(\w+)(?: : (\w+))? \{([^()]*?)\n\};", text):
            if name not in known:
                parent = known[base] if base else ctypes.Structure
                known[name] = type(name, (parent,), {"_fields_": _fields(body, known)})
    return known


def _fields(body: str, known: Structures) -> list[tuple[str, type[Any]]]:
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        match = re.fullmatch(r"(?:const )?((?:(?:un)?signed )?\w+)\s*([\w\s*,\[\]]+)", declaration)
        assert match is not None, declaration
        for declarator in match[2].split(","):
            name, _, count = declarator.strip(" *]").partition("[")
            kind = ctypes.c_uint64 if "*" in declarator else known[match[1]]
            fields.append((name, kind * int(count) if count else kind))
    return fields


def header_of(family: str) -> tuple[str, ...]:
    return ("common/views.h", "common/tensor_map.h", "common/tile_lists.h", "common/call_sizes.h", f"{family}/params.h")


def flattened(values: Any) -> list[tuple[str, Any]]:
    """The fields of a structure and of the structures within it, with their values.

    The value of a tensor map is its address, which the fake driver stores first.
    """
    pairs: list[tuple[str, Any]] = []
    for cls in reversed(type(values).__mro__):
        for name, _ in cls.__dict__.get("_fields_", ()):
            value = getattr(values, name)
            if name.endswith("_map"):
                pairs.append((name, int.from_bytes(bytes(value)[:8], "little")))
            elif isinstance(value, ctypes.Structure):
                pairs += flattened(value)
            else:
                pairs.append((name, list(value) if isinstance(value, ctypes.Array) else value))
    return pairs
