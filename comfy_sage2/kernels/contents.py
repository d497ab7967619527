"""What a kernel wheel holds: the device images, and a host module for each CPython that it serves."""

from __future__ import annotations

import importlib.machinery
import io
import sys
import sysconfig
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import PurePosixPath

from .errors import KernelUnavailable

_PACKED, _PLAIN = ".cubin.xz", ".cubin"


@dataclass(frozen=True)
class KernelFiles:
    """One architecture's extension module for this Python and its cubins, by the names they are loaded by."""

    extension_name: str
    extension: bytes
    cubins: dict[str, bytes]


def _unpacked(name: str, image: bytes) -> tuple[str, bytes]:
    """A cubin's name and its image."""
    if not name.endswith(_PACKED):
        return name.removesuffix(_PLAIN), image
    try:
        import lzma
    except ImportError as error:
        raise KernelUnavailable(
            f"[SA-105] this Python was built without the standard module lzma ({error}), which unpacks the kernels: "
            "use another Python, or install liblzma's headers and build this one again"
        ) from error
    try:
        return name.removesuffix(_PACKED), lzma.decompress(image)
    except (lzma.LZMAError, EOFError) as error:
        raise KernelUnavailable(f"[SA-106] {name} is damaged: {error}") from error


def _members(wheel: bytes, wheel_name: str, package: str) -> dict[str, bytes]:
    """The files in a package's folder of a wheel, by name."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            paths = {name: PurePosixPath(name) for name in archive.namelist()}
            return {path.name: archive.read(name) for name, path in paths.items() if str(path.parent) == package}
    # What zipfile raises for a damaged file, by the place of the damage.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise KernelUnavailable(f"[SA-106] {wheel_name} is not a readable wheel: {error}") from error


def read(wheel: bytes, wheel_name: str, architecture: str) -> KernelFiles:
    """The kernel files of a wheel's bytes, for this Python.

    KernelUnavailable when it is not a wheel of this architecture's kernels, or has no module for this Python.
    """
    package = f"comfy_sage2_{architecture}"
    members = _members(wheel, wheel_name, package)
    extensions = {name: content for name, content in members.items() if name.endswith((".so", ".pyd"))}
    cubins = dict(_unpacked(name, content) for name, content in members.items() if name.endswith((_PACKED, _PLAIN)))
    if not extensions or not cubins:
        raise KernelUnavailable(
            f"[SA-106] {wheel_name} is not a wheel of {architecture} kernels: expected an extension module and at "
            f"least one cubin in {package}/, got {len(extensions)} modules and {len(cubins)} cubins"
        )
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if f"_C{suffix}" in extensions:
            return KernelFiles(f"_C{suffix}", extensions[f"_C{suffix}"], cubins)
    raise KernelUnavailable(
        f"[SA-104] {wheel_name} has no module for {sys.implementation.name} "
        f"{sys.version_info.major}.{sys.version_info.minor} "
        f"on {sysconfig.get_platform()}; it has {', '.join(sorted(extensions))}: update the pack, or use another Python"
    )
