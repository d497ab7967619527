"""What a kernel wheel holds: device images with what their build says of itself, host modules, or both."""

from __future__ import annotations

import importlib.machinery
import io
import json
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from .errors import REINSTALL, KernelUnavailable, shortened

_PACKED, _PLAIN, _BUILD = ".cubin.xz", ".cubin", "build.json"
_MODULES = (".so", ".pyd")
# The modules of all CPythons packed as one, and the bytes of each, in their order. Host wheels have them since 5.1.0.
_ARCHIVE, _SIZES = "modules.xz", "modules.json"
# Far above what releases have: 70 files of at most 2 MB, 20 MB together, once they are unpacked.
_MOST_MEMBERS, _MOST_BYTES = 1000, 256 * 1024 * 1024


@dataclass(frozen=True)
class KernelFiles:
    """The files of a wheel's package that are for this Python.

    extension: the host module, or None in a wheel of images alone. cubins: by the names they are loaded by. build: the
    fields of build.json, or None in a wheel whose module says them itself (before 5.0.0).
    """

    extension_name: str = ""
    extension: bytes | None = None
    cubins: Mapping[str, bytes] = field(default_factory=dict)
    build: Mapping[str, Any] | None = None


class _Package:
    """A package's folder in a wheel; its files are read when they are asked for, up to _MOST_BYTES in all."""

    def __init__(self, archive: zipfile.ZipFile, wheel_name: str, package: str) -> None:
        self._archive, self._wheel_name = archive, wheel_name
        self._left = _MOST_BYTES
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS:
            raise KernelUnavailable(
                f"[SA-106] {wheel_name} is refused: it holds {len(members):,} files, at most {_MOST_MEMBERS:,} are "
                f"expected; {REINSTALL}"
            )
        paths = ((PurePosixPath(member.filename), member) for member in members)
        self.members = {path.name: member for path, member in paths if str(path.parent) == package}

    def _take(self, size: int, name: str) -> None:
        self._left -= size
        if self._left < 0:
            raise KernelUnavailable(
                f"[SA-106] {self._wheel_name} is refused: it holds more than {_MOST_BYTES:,} bytes, with "
                f"{shortened(name)}; {REINSTALL}"
            )

    def read(self, name: str) -> bytes:
        member = self.members[name]
        self._take(member.file_size, name)
        # `ZipFile.read` would unpack more than the size that stands in the archive before it cuts it off.
        with self._archive.open(member) as file:
            return file.read(member.file_size)

    def image(self, name: str) -> bytes:
        """A cubin, unpacked."""
        return self._unpacked(name) if name.endswith(_PACKED) else self.read(name)

    def _unpacked(self, name: str) -> bytes:
        content = self.read(name)
        try:
            import lzma
        except ImportError as error:
            raise KernelUnavailable(
                f"[SA-105] this Python was built without the standard module lzma ({error}), which unpacks the "
                "kernels: use another Python, or install liblzma's headers and build this one again"
            ) from error
        unpacking = lzma.LZMADecompressor()
        try:
            unpacked = unpacking.decompress(content, max_length=self._left + 1)
        except (lzma.LZMAError, EOFError) as error:
            raise KernelUnavailable(f"[SA-106] {shortened(name)} is damaged: {error}; {REINSTALL}") from error
        self._take(len(unpacked), name)
        if not unpacking.eof:
            raise KernelUnavailable(
                f"[SA-106] {shortened(name)} is damaged: it ends before its content does; {REINSTALL}"
            )
        return unpacked

    def _object(self, name: str) -> dict[str, Any] | None:
        """A JSON file, or None where it is not."""
        if name not in self.members:
            return None
        try:
            found = json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise KernelUnavailable(
                f"[SA-106] {name} of {self._wheel_name} is damaged: {error}; {REINSTALL}"
            ) from error
        if not isinstance(found, dict):
            raise KernelUnavailable(
                f"[SA-106] {name} of {self._wheel_name} is damaged: it is no JSON object; {REINSTALL}"
            )
        return found

    def build(self) -> Mapping[str, Any] | None:
        return self._object(_BUILD)

    def _in_archive(self, name: str, sizes: Mapping[str, Any]) -> bytes:
        """One of the modules that are packed as one."""
        if _ARCHIVE not in self.members:
            raise KernelUnavailable(f"[SA-106] {self._wheel_name} is damaged: it lacks {_ARCHIVE}; {REINSTALL}")
        content, start = self._unpacked(_ARCHIVE), 0
        if not all(type(size) is int and size > 0 for size in sizes.values()) or sum(sizes.values()) != len(content):
            raise KernelUnavailable(
                f"[SA-106] {self._wheel_name} is damaged: the sizes in {_SIZES} are not those of the {len(content):,} "
                f"bytes of {_ARCHIVE}; {REINSTALL}"
            )
        for module, size in sizes.items():
            if module == name:
                break
            start += size
        return content[start : start + sizes[name]]

    def extension(self) -> tuple[str, bytes] | None:
        """The host module for this Python with its name, or None where there are none; else KernelUnavailable."""
        sizes = self._object(_SIZES)
        modules = sorted(sizes if sizes is not None else (name for name in self.members if name.endswith(_MODULES)))
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            name = f"_C{suffix}"
            if name in modules:
                return name, self.read(name) if sizes is None else self._in_archive(name, sizes)
        if not modules:
            return None
        names = ", ".join(shortened(name) for name in modules[:20])
        raise KernelUnavailable(
            f"[SA-104] {self._wheel_name} has no module for {sys.implementation.name} "
            f"{sys.version_info.major}.{sys.version_info.minor} on {sysconfig.get_platform()}; it has {names}: "
            "update the pack, or use another Python"
        )


def read(wheel: bytes, wheel_name: str, part: str) -> KernelFiles:
    """The files of a wheel's bytes for this Python. part: an architecture, or "host" for host modules alone.

    KernelUnavailable when it is not such a wheel, or has no module for this Python.
    """
    package_name = f"comfy_sage2_{part}"
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            package = _Package(archive, wheel_name, package_name)
            extension = package.extension()
            images = [name for name in package.members if name.endswith((_PACKED, _PLAIN))]
            if part == "host":
                if extension is None:
                    raise KernelUnavailable(
                        f"[SA-106] {wheel_name} is not a wheel of host modules: {package_name}/ has no module; "
                        f"{REINSTALL}"
                    )
                return KernelFiles(*extension)
            build = package.build()
            if not images or (extension is None and build is None):
                raise KernelUnavailable(
                    f"[SA-106] {wheel_name} is not a wheel of {part} kernels: expected at least one cubin and {_BUILD} "
                    f"or an extension module in {package_name}/, got {len(images)} cubins, "
                    f"{'no ' if build is None else ''}{_BUILD} and {'no' if extension is None else 'a'} module; "
                    f"{REINSTALL}"
                )
            cubins = {name.partition(".cubin")[0]: package.image(name) for name in images}
            name, module = extension or ("", None)
            return KernelFiles(name, module, cubins, build)
    except KernelUnavailable:
        raise
    # What zipfile raises for a damaged file, by the place of the damage.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise KernelUnavailable(f"[SA-106] {wheel_name} is not a readable wheel: {error}; {REINSTALL}") from error
