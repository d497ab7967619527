"""The wheels that the pack carries: which of them fit here, and what they hold.

A wheel has either the device images of an architecture or the host modules of a platform. The manifest lists each with
its SHA-256, which is checked before anything is read from the wheel. Files are unpacked in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import io
import json
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REINSTALL = "update or reinstall the pack"  # the remedy for files that differ from the released ones
_PACKAGE = Path(__file__).resolve().parent.parent
# pip installs them inside the package; in a clone of the pack they lie beside it.
WHEELS = _PACKAGE / "wheels" if (_PACKAGE / "wheels").is_dir() else _PACKAGE.parent / "wheels"
MANIFEST = "SHA256SUMS"
HOST = "host"  # has the launch code for the images of every architecture
_IMAGE = ".cubin.xz"
_LINE = re.compile(
    r"(?P<sha256>[0-9a-f]{64})  "
    r"(?P<name>comfy_sage2_(?P<part>sm\d+|host)-(?P<version>\d+(?:\.\d+)*)-py3-none-(?P<platform>\w+)\.whl)"
)


class KernelUnavailable(RuntimeError):
    """The kernels of an architecture cannot be used; the message is the reason, written for the user."""


@dataclass(frozen=True)
class BundledWheel:
    """A wheel of the manifest. part: an architecture or HOST. platform: as in the tags of wheels."""

    path: Path
    sha256: str
    part: str
    version: tuple[int, ...]
    platform: str

    @property
    def fits(self) -> bool:
        this_platform = sysconfig.get_platform().replace("-", "_")
        return self.platform == "any" or re.sub(r"^manylinux_\d+_\d+", "linux", self.platform) == this_platform

    def read(self) -> bytes:
        """The wheel's bytes. KernelUnavailable when it is missing or is not the wheel that was released."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise KernelUnavailable(
                f"[SA-106] {self.path} cannot be read ({error.strerror or error}): {REINSTALL}"
            ) from error
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.sha256:
            raise KernelUnavailable(
                f"[SA-106] {self.path} is refused: its SHA-256 is {sha256}, {MANIFEST} has {self.sha256}. The file was "
                f"changed or damaged; {REINSTALL}"
            )
        return content


def read_manifest() -> tuple[BundledWheel, ...]:
    """The wheels that the manifest lists. KernelUnavailable when it is missing or malformed."""
    path = WHEELS / MANIFEST
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KernelUnavailable(f"[SA-106] {path} cannot be read ({error}): {REINSTALL}") from error
    wheels = []
    for line in lines:
        if line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise KernelUnavailable(f"[SA-106] {path} is damaged at {line[:100]!r}: {REINSTALL}")
        version = tuple(int(number) for number in match["version"].split("."))
        wheels.append(BundledWheel(WHEELS / match["name"], match["sha256"], match["part"], version, match["platform"]))
    return tuple(wheels)


def architectures() -> tuple[str, ...]:
    """The architectures that the manifest has wheels for. KernelUnavailable as for `read_manifest`."""
    return tuple(sorted({wheel.part for wheel in read_manifest()} - {HOST}))


def fitting(part: str) -> list[BundledWheel]:
    """The wheels of a part that fit this system. KernelUnavailable, which names what is missing, if there are none."""
    candidates = [wheel for wheel in read_manifest() if wheel.part == part]
    if not candidates:
        kernels = "launch code (comfy_sage2_host)" if part == HOST else f"{part} kernels"
        raise KernelUnavailable(
            f"[SA-104] the pack has no {kernels}; it has kernels for {', '.join(architectures()) or 'none'}: "
            + REINSTALL
        )
    wheels = [wheel for wheel in candidates if wheel.fits]
    if not wheels:
        platforms = ", ".join(sorted({wheel.platform for wheel in candidates}))
        raise KernelUnavailable(
            f"[SA-104] no bundled {part} kernel wheel fits {sysconfig.get_platform()}; there are wheels for "
            f"{platforms}: run ComfyUI on one of these"
        )
    return wheels


def read_images(wheel: BundledWheel) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The build's facts about a wheel's device images, and the images by name. KernelUnavailable if damaged."""
    with _files(wheel) as files:
        images = {name.removesuffix(_IMAGE): content for name, content in files.items() if name.endswith(_IMAGE)}
        return json.loads(files["build.json"]), images


def read_host(wheel: BundledWheel) -> tuple[str, bytes]:
    """Name and bytes of a wheel's host module for this Python, or KernelUnavailable.

    One archive has the modules of all CPythons, one after the other; modules.json has the size of each, in order.
    """
    fitting_names = {f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES}
    with _files(wheel) as files:
        sizes = json.loads(files["modules.json"])
        start = 0
        for name, size in sizes.items():
            if name in fitting_names:
                return name, files["modules.xz"][start : start + size]
            start += size
    raise KernelUnavailable(
        f"[SA-104] {wheel.path.name} has no module for {sys.implementation.name} {sys.version_info.major}."
        f"{sys.version_info.minor} on {sysconfig.get_platform()}; it has {', '.join(sizes)}: update the pack, or use "
        "another Python"
    )


@contextlib.contextmanager
def _files(wheel: BundledWheel) -> Iterator[dict[str, bytes]]:
    """The unpacked files of the wheel's package, by name. A reader's KeyError becomes KernelUnavailable too."""
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
    except (zipfile.BadZipFile, lzma.LZMAError, KeyError, RuntimeError, ValueError) as error:
        raise KernelUnavailable(
            f"[SA-106] {wheel.path} is not a wheel of {wheel.part} kernels ({type(error).__name__}: {error}): "
            + REINSTALL
        ) from error
