"""The wheels that the pack carries: which of them fit here, and their bytes once their checksum is right."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .errors import REINSTALL, KernelUnavailable

_PACKAGE = Path(__file__).resolve().parent.parent
# pip installs them inside the package; in a clone of the pack they lie beside it.
WHEELS = _PACKAGE / "wheels" if (_PACKAGE / "wheels").is_dir() else _PACKAGE.parent / "wheels"
MANIFEST = "SHA256SUMS"
HOST = "host"  # has the launch code for the images of every architecture
_LINE = re.compile(
    r"(?P<sha256>[0-9a-f]{64})  "
    r"(?P<name>comfy_sage2_(?P<part>sm\d+|host)-(?P<version>\d+(?:\.\d+)*)-py3-none-(?P<platform>\w+)\.whl)"
)


@dataclass(frozen=True)
class BundledWheel:
    """A wheel of the manifest: of an architecture or HOST, for a platform as tags of wheels name it."""

    path: Path
    sha256: str
    part: str
    version: tuple[int, ...]
    platform: str

    @property
    def fits(self) -> bool:
        """Whether it is for this system."""
        own = sysconfig.get_platform().replace("-", "_")
        return self.platform == "any" or re.sub(r"^manylinux_\d+_\d+", "linux", self.platform) == own

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


def find_all(part: str) -> tuple[BundledWheel, ...]:
    """The wheels of an architecture, or of HOST, that fit this system: the newest first.

    KernelUnavailable when there is none, naming what was looked for and what there is.
    """
    candidates = [wheel for wheel in read_manifest() if wheel.part == part]
    if not candidates:
        kernels = "launch code (comfy_sage2_host)" if part == HOST else f"{part} kernels"
        raise KernelUnavailable(
            f"[SA-104] the pack has no {kernels}; it has kernels for {', '.join(architectures()) or 'none'}: "
            + REINSTALL
        )
    fitting = [wheel for wheel in candidates if wheel.fits]
    if not fitting:
        platforms = ", ".join(sorted({wheel.platform for wheel in candidates}))
        raise KernelUnavailable(
            f"[SA-104] no bundled {part} kernel wheel fits {sysconfig.get_platform()}; there are wheels for "
            f"{platforms}: run ComfyUI on one of these"
        )
    return tuple(sorted(fitting, key=lambda wheel: wheel.version, reverse=True))
