"""The wheels that the pack carries: which one fits here, and its bytes once their checksum is right."""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .errors import KernelUnavailable

_PACKAGE = Path(__file__).resolve().parent.parent
# pip installs them inside the package; in a clone of the pack they lie beside it.
WHEELS = _PACKAGE / "wheels" if (_PACKAGE / "wheels").is_dir() else _PACKAGE.parent / "wheels"
MANIFEST = "SHA256SUMS"
_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64})  (?P<name>[A-Za-z0-9_.+-]+\.whl)")
_DISTRIBUTION = re.compile(r"comfy[-_]sage2[-_](?P<architecture>sm\d+)")


def _read(path: Path) -> bytes:
    """The file's bytes. OSError when it cannot be read, or is a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    return path.read_bytes()


@dataclass(frozen=True)
class BundledWheel:
    """A wheel of the manifest, with the checksum that it must have."""

    path: Path
    sha256: str

    def read(self) -> bytes:
        """The wheel's bytes. KernelUnavailable when it is missing or is not the wheel that was released."""
        try:
            content = _read(self.path)
        except OSError as error:
            raise KernelUnavailable(
                f"[SA-106] {self.path} cannot be read ({error.strerror or error}): update or reinstall the pack"
            ) from error
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise KernelUnavailable(
                f"[SA-106] {self.path} is refused: its SHA-256 is {found}, {MANIFEST} has {self.sha256}. The file was "
                "changed or damaged; update or reinstall the pack"
            )
        return content


def read_manifest(folder: Path = WHEELS) -> tuple[BundledWheel, ...]:
    """The wheels that `folder`'s manifest lists. KernelUnavailable when it is missing or malformed."""
    path = folder / MANIFEST
    try:
        lines = _read(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KernelUnavailable(f"[SA-106] {path} cannot be read ({error}): update or reinstall the pack") from error
    wheels = []
    for line in lines:
        entry = _LINE.fullmatch(line)
        if entry is None:
            raise KernelUnavailable(f"[SA-106] {path} is damaged at {line!r}: update or reinstall the pack")
        wheels.append(BundledWheel(folder / entry["name"], entry["sha256"]))
    return tuple(wheels)


def _architecture(wheel: BundledWheel) -> str | None:
    found = _DISTRIBUTION.fullmatch(wheel.path.name.split("-", 1)[0])
    return found["architecture"] if found else None


def _listed(wheels: list[BundledWheel], field: int) -> str:
    """All tags in one field of the wheels' names, in words."""
    tags = {tag for wheel in wheels for tag in wheel.path.stem.split("-")[field].split(".")}
    return ", ".join(sorted(tags))


def architectures(folder: Path = WHEELS) -> tuple[str, ...]:
    """The architectures that the manifest has wheels for. KernelUnavailable as for `read_manifest`."""
    return tuple(sorted({name for wheel in read_manifest(folder) if (name := _architecture(wheel))}))


def find(architecture: str, folder: Path = WHEELS) -> BundledWheel:
    """The wheel that fits this interpreter and platform best.

    KernelUnavailable when there is none, naming what was looked for and what there is.
    """
    try:
        from packaging.tags import sys_tags
        from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    except ImportError as error:
        raise KernelUnavailable(
            "[SA-105] the Python package 'packaging' is needed to choose a kernel wheel and cannot be imported "
            f"({error}): install the pack's requirements.txt"
        ) from error

    candidates = [wheel for wheel in read_manifest(folder) if _architecture(wheel) == architecture]
    if not candidates:
        raise KernelUnavailable(
            f"[SA-104] the pack has no {architecture} kernels; it has kernels for "
            f"{', '.join(architectures(folder)) or 'none'}"
        )
    rank = {tag: position for position, tag in enumerate(sys_tags())}
    best, best_rank = None, len(rank)
    for wheel in candidates:
        try:
            tags = parse_wheel_filename(wheel.path.name)[3]
        except InvalidWheelFilename as error:
            raise KernelUnavailable(
                f"[SA-106] {folder / MANIFEST} is damaged: {error}; update or reinstall the pack"
            ) from error
        wheel_rank = min((rank[tag] for tag in tags if tag in rank), default=len(rank))
        if wheel_rank < best_rank:
            best, best_rank = wheel, wheel_rank
    if best is None:
        raise KernelUnavailable(
            f"[SA-104] no bundled {architecture} kernel wheel fits {sys.implementation.name} "
            f"{sys.version_info.major}.{sys.version_info.minor} on {sysconfig.get_platform()}; there are wheels for "
            f"{_listed(candidates, -3)} on {_listed(candidates, -1)}"
        )
    return best
