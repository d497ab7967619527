"""What a kernel wheel holds: the device images of an architecture, or the host modules of a platform."""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from typing import Any

from .errors import REINSTALL, KernelUnavailable
from .manifest import BundledWheel

_IMAGE = ".cubin.xz"


def read_images(wheel: BundledWheel) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the build of a wheel's device images says of them, and the images by the names they are loaded by.

    KernelUnavailable when the wheel was changed, or is no wheel of images.
    """
    with _files(wheel) as files:
        images = {name.removesuffix(_IMAGE): content for name, content in files.items() if name.endswith(_IMAGE)}
        return json.loads(files["build.json"]), images


def read_host(wheel: BundledWheel) -> tuple[str, bytes]:
    """The file name and the bytes of a wheel's host module for this Python.

    The modules of all CPythons are one archive; modules.json has the bytes of each, in their order. KernelUnavailable
    when the wheel was changed, or has no such module.
    """
    own = {f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES}
    with _files(wheel) as files:
        sizes = json.loads(files["modules.json"])
        start = 0
        for name, size in sizes.items():
            if name in own:
                return name, files["modules.xz"][start : start + size]
            start += size
    raise KernelUnavailable(
        f"[SA-104] {wheel.path.name} has no module for {sys.implementation.name} {sys.version_info.major}."
        f"{sys.version_info.minor} on {sysconfig.get_platform()}; it has {', '.join(sizes)}: update the pack, or use "
        "another Python"
    )


@contextlib.contextmanager
def _files(wheel: BundledWheel) -> Iterator[dict[str, bytes]]:
    """The unpacked files of the wheel's package, by name. KernelUnavailable also for what their reader misses."""
    content = wheel.read()
    try:
        import lzma
    except ImportError as error:
        raise KernelUnavailable(
            f"[SA-105] this Python was built without the standard module lzma ({error}), which unpacks the kernels: "
            "use another Python, or install liblzma's headers and build this one again"
        ) from error
    files = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for path in archive.namelist():
                package, _, name = path.rpartition("/")
                if package == f"comfy_sage2_{wheel.part}":
                    packed = archive.read(path)
                    files[name] = lzma.decompress(packed) if name.endswith(".xz") else packed
        yield files
    except (zipfile.BadZipFile, lzma.LZMAError, KeyError, ValueError) as error:
        raise KernelUnavailable(
            f"[SA-106] {wheel.path} is not a wheel of {wheel.part} kernels ({type(error).__name__}: {error}): "
            + REINSTALL
        ) from error
