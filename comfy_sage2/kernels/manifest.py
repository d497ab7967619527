"""The wheels that the pack carries: which one fits here, and its bytes once their checksum is right."""

from __future__ import annotations

import hashlib
import re
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .errors import REINSTALL, KernelUnavailable, shortened

_PACKAGE = Path(__file__).resolve().parent.parent
# pip installs them inside the package; in a clone of the pack they lie beside it.
WHEELS = _PACKAGE / "wheels" if (_PACKAGE / "wheels").is_dir() else _PACKAGE.parent / "wheels"
MANIFEST = "SHA256SUMS"
# What has the launch code for the images of every architecture.
HOST = "host"
# A checksum, or a size in a comment, which `sha256sum --check` passes over.
_NAME = r"(?P<name>[A-Za-z0-9_.+-]{1,200}\.whl)"
_CHECKSUM = re.compile(rf"(?P<sha256>[0-9a-f]{{64}})  {_NAME}")
_SIZE = re.compile(rf"# {_NAME} has (?P<size>\d{{1,12}}) bytes")
_DISTRIBUTION = re.compile(r"comfy[-_]sage2[-_](?P<part>sm\d+|host)")
_CHANGED = f"The file was changed or damaged; {REINSTALL}"
_MOST_MANIFEST_BYTES = 64 * 1024
_MOST_WHEEL_BYTES = 64 * 1024 * 1024  # whatever the manifest says; those of releases have up to 2.3 MB


def _size(path: Path) -> int:
    """A file's bytes. OSError when it is not there, or is a pipe or a device, which may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is not a regular file")
    return status.st_size


def _read(path: Path, most: int) -> bytes:
    """The bytes of a file that has at most `most`; a larger one is not read. OSError when it cannot be read."""
    size = _size(path)
    if size > most:
        raise OSError(f"it has {size:,} bytes, at most {most:,} are expected")
    with path.open("rb") as file:
        return file.read(most + 1)


@dataclass(frozen=True)
class BundledWheel:
    """A wheel of the manifest, with the checksum and the size in bytes that it must have."""

    path: Path
    sha256: str
    size: int

    def read(self) -> bytes:
        """The wheel's bytes. KernelUnavailable when it is missing or is not the wheel that was released."""
        try:
            size = _size(self.path)
            content = _read(self.path, _MOST_WHEEL_BYTES) if size == self.size else b""
        except OSError as error:
            raise KernelUnavailable(
                f"[SA-106] {self.path} cannot be read ({error.strerror or error}): {REINSTALL}"
            ) from error
        if size != self.size:
            raise KernelUnavailable(
                f"[SA-106] {self.path} is refused: it has {size:,} bytes, {MANIFEST} says {self.size:,}. {_CHANGED}"
            )
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise KernelUnavailable(
                f"[SA-106] {self.path} is refused: its SHA-256 is {found}, {MANIFEST} has {self.sha256}. {_CHANGED}"
            )
        return content

    @property
    def version(self) -> tuple[int, ...]:
        """As numbers; () for a name that has none."""
        parts = self.path.name.split("-")[1:2]
        return tuple(int(number) for number in re.findall(r"\d{1,9}", parts[0])) if parts else ()


def read_manifest(folder: Path = WHEELS) -> tuple[BundledWheel, ...]:
    """The wheels that `folder`'s manifest lists. KernelUnavailable when it is missing or malformed."""
    path = folder / MANIFEST
    try:
        lines = _read(path, _MOST_MANIFEST_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KernelUnavailable(f"[SA-106] {path} cannot be read ({error}): {REINSTALL}") from error
    checksums: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for line in lines:
        if checksum := _CHECKSUM.fullmatch(line):
            checksums[checksum["name"]] = checksum["sha256"]
        elif size := _SIZE.fullmatch(line):
            sizes[size["name"]] = int(size["size"])
        else:
            raise KernelUnavailable(f"[SA-106] {path} is damaged at '{shortened(line)}': {REINSTALL}")
    for name in checksums:
        if name not in sizes:
            raise KernelUnavailable(
                f"[SA-106] {path} is damaged: it does not say how many bytes {name} has; {REINSTALL}"
            )
    return tuple(BundledWheel(folder / name, sha256, sizes[name]) for name, sha256 in checksums.items())


def _part(wheel: BundledWheel) -> str | None:
    """The architecture that a wheel is of, or HOST."""
    found = _DISTRIBUTION.fullmatch(wheel.path.name.split("-", 1)[0])
    return found["part"] if found else None


def _listed(wheels: list[BundledWheel], field: int) -> str:
    """All tags in one field of the wheels' names, in words."""
    tags = {tag for wheel in wheels for tag in wheel.path.stem.split("-")[field].split(".")}
    return ", ".join(sorted(tags))


def architectures(folder: Path = WHEELS) -> tuple[str, ...]:
    """The architectures that the manifest has wheels for. KernelUnavailable as for `read_manifest`."""
    parts = {part for wheel in read_manifest(folder) if (part := _part(wheel)) not in (None, HOST)}
    return tuple(sorted(part for part in parts if part is not None))


def find_all(part: str, folder: Path = WHEELS) -> tuple[BundledWheel, ...]:
    """The wheels of an architecture, or of HOST, that fit this interpreter and platform: the newest first.

    Of one version the one that fits best comes first. KernelUnavailable when there is none, naming what was looked for
    and what there is.
    """
    try:
        from packaging.tags import sys_tags
        from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    except ImportError as error:
        raise KernelUnavailable(
            "[SA-105] the Python package 'packaging' is needed to choose a kernel wheel and cannot be imported "
            f"({error}): install the pack's requirements.txt"
        ) from error

    candidates = [wheel for wheel in read_manifest(folder) if _part(wheel) == part]
    if not candidates and part == HOST:
        raise KernelUnavailable(
            f"[SA-104] {folder / MANIFEST} lists no wheel with the launch code of the kernels (comfy_sage2_host): "
            + REINSTALL
        )
    if not candidates:
        raise KernelUnavailable(
            f"[SA-104] the pack has no {part} kernels; it has kernels for {', '.join(architectures(folder)) or 'none'}"
            f": {REINSTALL}"
        )
    rank = {tag: position for position, tag in enumerate(sys_tags())}
    fitting = []
    for wheel in candidates:
        try:
            tags = parse_wheel_filename(wheel.path.name)[3]
        except InvalidWheelFilename as error:
            raise KernelUnavailable(f"[SA-106] {folder / MANIFEST} is damaged: {error}; {REINSTALL}") from error
        ranks = [rank[tag] for tag in tags if tag in rank]
        if ranks:
            fitting.append((wheel, min(ranks)))
    if not fitting:
        raise KernelUnavailable(
            f"[SA-104] no bundled {part} kernel wheel fits {sys.implementation.name} "
            f"{sys.version_info.major}.{sys.version_info.minor} on {sysconfig.get_platform()}; there are wheels for "
            f"{_listed(candidates, -3)} on {_listed(candidates, -1)}: run ComfyUI with one of these"
        )
    fitting.sort(key=lambda entry: entry[1])
    fitting.sort(key=lambda entry: entry[0].version, reverse=True)
    return tuple(wheel for wheel, _ in fitting)
