"""What a kernel wheel holds: the device images of an architecture, or the host modules of a platform."""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import itertools
import json
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from .errors import REINSTALL, KernelUnavailable, shortened
from .manifest import HOST

_IMAGE, _BUILD = ".cubin.xz", "build.json"
# The modules of all CPythons packed as one, and the bytes of each, in their order.
_ARCHIVE, _SIZES = "modules.xz", "modules.json"
# What releases are compressed by. Of the others some raise errors of their own, and some unpack more than is asked for.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Far above what releases have: 70 files of at most 2 MB, 20 MB together, once they are unpacked.
_MOST_MEMBERS, _MOST_BYTES = 1000, 256 * 1024 * 1024


def _damaged(what: str, why: object) -> KernelUnavailable:
    return KernelUnavailable(f"[SA-106] {what} is damaged: {why}; {REINSTALL}")


def _refused(wheel_name: str, why: str) -> KernelUnavailable:
    return KernelUnavailable(f"[SA-106] {wheel_name} is refused: {why}; {REINSTALL}")


@dataclass(frozen=True)
class Images:
    """An architecture's device images, by the names they are loaded by, and what their build says of them."""

    cubins: Mapping[str, bytes]
    build: Mapping[str, Any]


@dataclass(frozen=True)
class HostModule:
    """The launch code for this Python: the name of its file, and its bytes."""

    name: str
    content: bytes


class _Package:
    """A package's folder in a wheel; its files are read when they are asked for, up to _MOST_BYTES in all."""

    def __init__(self, archive: zipfile.ZipFile, wheel_name: str, package: str) -> None:
        self._archive, self._wheel_name = archive, wheel_name
        self._left = _MOST_BYTES
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS:
            raise _refused(wheel_name, f"it holds {len(members):,} files, at most {_MOST_MEMBERS:,} are expected")
        paths = ((PurePosixPath(member.filename), member) for member in members)
        self.members = {path.name: member for path, member in paths if str(path.parent) == package}

    def _take(self, size: int, name: str) -> None:
        self._left -= size
        if self._left < 0:
            raise _refused(self._wheel_name, f"it holds more than {_MOST_BYTES:,} bytes, with {shortened(name)}")

    def _read(self, name: str) -> bytes:
        member = self.members[name]
        if member.compress_type not in _COMPRESSIONS:
            why = f"{shortened(name)} is compressed by method {member.compress_type}, which wheels are not"
            raise _refused(self._wheel_name, why)
        self._take(member.file_size, name)
        # `ZipFile.read` would unpack more than the size that stands in the archive before it cuts it off.
        with self._archive.open(member) as file:
            return file.read(member.file_size)

    def unpacked(self, name: str) -> bytes:
        """An .xz file's content."""
        content = self._read(name)
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
            raise _damaged(shortened(name), error) from error
        self._take(len(unpacked), name)
        if not unpacking.eof:
            raise _damaged(shortened(name), "it ends before its content does")
        return unpacked

    def json_object(self, name: str) -> dict[str, Any] | None:
        """A JSON file, or None where it is not."""
        if name not in self.members:
            return None
        try:
            found = json.loads(self._read(name))
        except (ValueError, RecursionError) as error:
            raise _damaged(f"{name} of {self._wheel_name}", error) from error
        if not isinstance(found, dict):
            raise _damaged(f"{name} of {self._wheel_name}", "it is no JSON object")
        return found


@contextlib.contextmanager
def _package(wheel: bytes, wheel_name: str, part: str) -> Iterator[_Package]:
    """The package's folder of a wheel's bytes. KernelUnavailable for whatever is wrong with the archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            yield _Package(archive, wheel_name, f"comfy_sage2_{part}")
    except KernelUnavailable:
        raise
    # What zipfile raises for a damaged file, by the place of the damage.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise KernelUnavailable(f"[SA-106] {wheel_name} is not a readable wheel: {error}; {REINSTALL}") from error


def read_images(wheel: bytes, wheel_name: str, architecture: str) -> Images:
    """The device images in a wheel's bytes. KernelUnavailable when it is damaged, or no wheel of this architecture."""
    with _package(wheel, wheel_name, architecture) as package:
        build = package.json_object(_BUILD)
        images = [name for name in package.members if name.endswith(_IMAGE)]
        if build is None or not images:
            raise KernelUnavailable(
                f"[SA-106] {wheel_name} is not a wheel of {architecture} kernels: expected {_BUILD} and at least one "
                f"{_IMAGE} file in comfy_sage2_{architecture}/, got {'no ' if build is None else ''}{_BUILD} and "
                f"{len(images)} such files; {REINSTALL}"
            )
        return Images({name.removesuffix(_IMAGE): package.unpacked(name) for name in images}, build)


def read_host(wheel: bytes, wheel_name: str) -> HostModule:
    """The host module for this Python in a wheel's bytes. KernelUnavailable when it is damaged, or has none."""
    with _package(wheel, wheel_name, HOST) as package:
        sizes = package.json_object(_SIZES)
        if not sizes or _ARCHIVE not in package.members:
            raise KernelUnavailable(
                f"[SA-106] {wheel_name} is not a wheel of host modules: comfy_sage2_{HOST}/ must have {_ARCHIVE}, and "
                f"{_SIZES} with the modules in it; {REINSTALL}"
            )
        own = (f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
        name = next((name for name in own if name in sizes), None)
        if name is None:
            names = ", ".join(shortened(name) for name in sorted(sizes)[:20])
            raise KernelUnavailable(
                f"[SA-104] {wheel_name} has no module for {sys.implementation.name} "
                f"{sys.version_info.major}.{sys.version_info.minor} on {sysconfig.get_platform()}; it has {names}: "
                "update the pack, or use another Python"
            )
        content = package.unpacked(_ARCHIVE)
        if not all(type(size) is int and size > 0 for size in sizes.values()) or sum(sizes.values()) != len(content):
            why = f"the sizes in {_SIZES} are not those of the {len(content):,} bytes of {_ARCHIVE}"
            raise _damaged(wheel_name, why)
        start = sum(itertools.islice(sizes.values(), list(sizes).index(name)))
        return HostModule(name, content[start : start + sizes[name]])
