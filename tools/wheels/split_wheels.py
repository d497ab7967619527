"""Make the released wheels from the parts that cibuildwheel has built: one wheel for each CPython.

    python -m tools.wheels.split_wheels WHEELHOUSE PART [...]

A part holds the device images of all architectures, and one CPython's host modules for all platforms. The parts become
a wheel for each architecture, with its images, and a wheel for each platform, with the host modules of all CPythons
packed into one archive.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .. import kernel_table
from . import packed_modules
from .stage_package import HOST, ROOT, TEMPLATE

PLATFORMS: dict[str, dict[str, str]] = json.loads((TEMPLATE / "platforms.json").read_text())
# The oldest time that a zip file can state, so that a wheel does not depend on when it was built.
_TIME = (1980, 1, 1, 0, 0, 0)
_FILE_MODE = 0o644 << 16
_UNIX = 3


@dataclass(frozen=True)
class Part:
    """A wheel that cibuildwheel has built, for one CPython."""

    name: str
    interpreter: str  # such as "cp312"
    files: Mapping[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Part:
        """ValueError when the name is not that of a wheel for one CPython."""
        fields = path.stem.split("-")
        if len(fields) != 5 or fields[2] != fields[3] or not fields[2].removeprefix("cp").isdigit():
            raise ValueError(f"{path.name} is not the name of a wheel for one CPython")
        with zipfile.ZipFile(path) as archive:
            files = {item.filename: archive.read(item) for item in archive.infolist() if not item.is_dir()}
        return cls(path.name, fields[2], files)

    def package(self, name: str) -> dict[str, bytes]:
        """The files of one of its packages."""
        return {file: content for file, content in self.files.items() if file.startswith(f"{name}/")}

    def architectures(self) -> list[str]:
        """The architectures whose images it holds."""
        packages = {PurePosixPath(file).parts[0] for file in self.files} - {HOST}
        return sorted(name.removeprefix("comfy_sage2_") for name in packages if name.startswith("comfy_sage2_sm"))


@dataclass(frozen=True)
class Distribution:
    """The metadata of a wheel."""

    package: str
    version: str
    summary: str
    tag: str  # py3-none-any, or a platform's tag
    requirements: tuple[str, ...] = ()

    @property
    def wheel_name(self) -> str:
        return f"{self.package}-{self.version}-{self.tag}.whl"

    def information(self) -> dict[str, bytes]:
        """The files of its .dist-info folder except RECORD."""
        metadata = [
            "Metadata-Version: 2.1",
            f"Name: {self.package.replace('_', '-')}",
            f"Version: {self.version}",
            f"Summary: {self.summary}",
            "License: Apache-2.0",
            "Requires-Python: >=3.10",
            *(f"Requires-Dist: {requirement}" for requirement in self.requirements),
            "Description-Content-Type: text/markdown",
            "",
            (TEMPLATE / "README.md").read_text(),
        ]
        is_pure = "true" if self.tag.endswith("-any") else "false"
        wheel = f"Wheel-Version: 1.0\nGenerator: comfy_sage2\nRoot-Is-Purelib: {is_pure}\nTag: {self.tag}\n"
        folder = f"{self.package}-{self.version}.dist-info"
        return {
            f"{folder}/METADATA": "\n".join(metadata).encode(),
            f"{folder}/WHEEL": wheel.encode(),
            f"{folder}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        }


def _record_lines(files: Mapping[str, bytes]) -> Iterator[str]:
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        yield f"{name},sha256={digest},{len(files[name])}\n"


def write(distribution: Distribution, files: Mapping[str, bytes], out: Path) -> Path:
    """Write a wheel: equal files give equal bytes. Files that are packed already (.xz) are stored as they are."""
    record = f"{distribution.package}-{distribution.version}.dist-info/RECORD"
    members = {**files, **distribution.information()}
    members[record] = "".join([*_record_lines(members), f"{record},,\n"]).encode()
    path = out / distribution.wheel_name
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(members, key=lambda name: (".dist-info/" in name, name)):
            item = zipfile.ZipInfo(name, _TIME)
            item.external_attr, item.create_system = _FILE_MODE, _UNIX
            item.compress_type = zipfile.ZIP_STORED if name.endswith(".xz") else zipfile.ZIP_DEFLATED
            archive.writestr(item, members[name], compresslevel=9)
    return path


def image_files(parts: Sequence[Part], architecture: str) -> dict[str, bytes]:
    """The files of an architecture's package. ValueError unless they are equal in all parts."""
    first, *rest = (part.package(f"comfy_sage2_{architecture}") for part in parts)
    for files in rest:
        differing = sorted(name for name in first.keys() | files.keys() if first.get(name) != files.get(name))
        if differing:
            raise ValueError(f"{', '.join(differing)} differs between the CPythons")
    return first


def host_files(parts: Sequence[Part], platform: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a platform's host package, with the module of each part. ValueError when a part lacks its module."""
    files: dict[str, bytes] = {}
    for part in parts:
        module = f"{HOST}/{platform['module'].format(part.interpreter.removeprefix('cp'))}"
        package_files = part.package(HOST)
        if module not in package_files:
            raise ValueError(f"{part.name} lacks {module}")
        files[module] = package_files[module]
        for name, content in package_files.items():
            if not name.endswith(packed_modules.MODULES) and files.setdefault(name, content) != content:
                raise ValueError(f"{name} differs between the CPythons")
    return files


def of_images(architecture: str, version: str) -> Distribution:
    """The distribution of an architecture's images."""
    hardware = kernel_table.read(architecture).hardware
    abi = int(version.partition(".")[0])
    return Distribution(
        f"comfy_sage2_{architecture}",
        version,
        f"Device images of comfy-sage2's attention kernels for {hardware}",
        "py3-none-any",
        (f"comfy-sage2-host<{abi + 1},>={abi}",),
    )


def of_host(platform: Mapping[str, str], version: str) -> Distribution:
    """The distribution of a platform's host modules."""
    summary = "Launch code of comfy-sage2's attention kernels, for the images of every architecture"
    return Distribution(HOST, version, summary, f"py3-none-{platform['wheel_tag']}")


def check_old_systems(wheel: Path, wheel_tag: str) -> None:
    """SystemExit unless auditwheel confirms that the modules load on systems as old as the tag promises."""
    answer = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True, capture_output=True, text=True
    )
    words = " ".join(answer.stdout.split())
    if f'platform tag: "{wheel_tag}"' not in words:
        raise SystemExit(f"auditwheel does not find {wheel.name} to be a {wheel_tag} wheel:\n{answer.stdout}")


def make(paths: Sequence[Path], out: Path, versions: Mapping[str, str] | None = None) -> list[Path]:
    """Write all wheels into `out`. ValueError when the parts do not fit together.

    versions: package ("comfy_sage2_sm90" or "comfy_sage2_host") -> version of its wheels; by default that of csrc/.
    """
    parts = sorted((Part.read(path) for path in paths), key=lambda part: int(part.interpreter.removeprefix("cp")))
    if len({tuple(part.architectures()) for part in parts}) != 1:
        raise ValueError(f"the parts must hold the same architectures, got {[part.name for part in parts]}")
    out.mkdir(parents=True, exist_ok=True)
    version_of, newest = versions or {}, kernel_table.version()
    wheels = []
    for architecture in parts[0].architectures():
        version = version_of.get(f"comfy_sage2_{architecture}", newest)
        wheels.append(write(of_images(architecture, version), image_files(parts, architecture), out))
    for platform in PLATFORMS.values():
        distribution, files = of_host(platform, version_of.get(HOST, newest)), host_files(parts, platform)
        if "linux" in platform["wheel_tag"]:
            with tempfile.TemporaryDirectory() as folder:  # auditwheel finds only modules that are not packed
                check_old_systems(write(distribution, files, Path(folder)), platform["wheel_tag"])
        wheels.append(write(distribution, packed_modules.pack(HOST, files), out))
    return wheels


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the released wheels from the parts that were built.")
    parser.add_argument("wheelhouse", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    arguments = parser.parse_args()
    for wheel in make(arguments.parts, arguments.wheelhouse):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
