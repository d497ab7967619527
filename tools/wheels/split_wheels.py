"""Make the wheels of each platform from the wheels that cibuildwheel has built, one for each CPython.

    python -m tools.wheels.platform_wheels WHEELHOUSE PART [...]

A part holds one CPython's modules for all platforms. A platform's wheel holds the modules of all CPythons for that
platform, the other files once, and the tags of all of them.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .stage_package import ROOT

PLATFORMS = ROOT / "packages" / "kernels" / "platforms.json"
# The oldest time that a zip file can state: nothing of a wheel tells when it was made.
_TIME = (1980, 1, 1, 0, 0, 0)
_FILE_MODE = 0o644 << 16
_UNIX = 3


@dataclass(frozen=True)
class PythonWheel:
    """A wheel that cibuildwheel has built, for one CPython."""

    distribution: str
    version: str
    interpreter: str  # such as "cp312"
    files: Mapping[str, bytes]

    @classmethod
    def read(cls, path: Path) -> PythonWheel:
        """ValueError when the name is not that of a wheel for one CPython."""
        fields = path.stem.split("-")
        if len(fields) != 5 or fields[2] != fields[3] or not fields[2].removeprefix("cp").isdigit():
            raise ValueError(f"{path.name} is not the name of a wheel for one CPython")
        with zipfile.ZipFile(path) as archive:
            files = {item.filename: archive.read(item) for item in archive.infolist() if not item.is_dir()}
        return cls(fields[0], fields[1], fields[2], files)


def _is_module(name: str) -> bool:
    return PurePosixPath(name).suffix in (".so", ".pyd")


def _merged(parts: list[PythonWheel], platform: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a platform's wheel but for WHEEL and RECORD. ValueError when the parts do not fit together."""
    merged: dict[str, bytes] = {}
    for part in parts:
        own_module = platform["module"].format(part.interpreter.removeprefix("cp"))
        if not any(PurePosixPath(name).name == own_module for name in part.files):
            raise ValueError(f"the part of {part.distribution} for {part.interpreter} lacks {own_module}")
        for name, content in part.files.items():
            if name.endswith((".dist-info/WHEEL", ".dist-info/RECORD")):
                continue
            if _is_module(name) and PurePosixPath(name).name != own_module:
                continue
            if merged.setdefault(name, content) != content:
                raise ValueError(f"{name} of {part.distribution} differs between the CPythons")
    return merged


def _wheel_file(part: PythonWheel, tags: list[str]) -> bytes:
    """The file WHEEL of a part, with other tags."""
    lines = part.files[f"{part.distribution}-{part.version}.dist-info/WHEEL"].decode().splitlines()
    kept = [line for line in lines if line and not line.startswith("Tag: ")]
    return "\n".join([*kept, *(f"Tag: {tag}" for tag in tags), ""]).encode()


def _record_lines(files: Mapping[str, bytes]) -> Iterator[str]:
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        yield f"{name},sha256={digest},{len(files[name])}\n"


def _write(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a zip file that is the same for the same files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            item = zipfile.ZipInfo(name, _TIME)
            item.compress_type, item.external_attr, item.create_system = zipfile.ZIP_DEFLATED, _FILE_MODE, _UNIX
            archive.writestr(item, files[name], compresslevel=9)


def merge(parts: list[PythonWheel], platform: Mapping[str, str], out: Path) -> Path:
    """Write one platform's wheel into `out`. ValueError when the parts do not fit together."""
    files = _merged(parts, platform)
    interpreters = [part.interpreter for part in parts]
    tags = [f"{interpreter}-{interpreter}-{platform['wheel_tag']}" for interpreter in interpreters]
    information = f"{parts[0].distribution}-{parts[0].version}.dist-info"
    files[f"{information}/WHEEL"] = _wheel_file(parts[0], tags)
    files[f"{information}/RECORD"] = "".join([*_record_lines(files), f"{information}/RECORD,,\n"]).encode()
    compressed = ".".join(interpreters)
    wheel = out / f"{information.removesuffix('.dist-info')}-{compressed}-{compressed}-{platform['wheel_tag']}.whl"
    _write(wheel, files)
    return wheel


def check_old_systems(wheel: Path, wheel_tag: str) -> None:
    """Let auditwheel confirm that the modules load on systems as old as the tag promises, or SystemExit."""
    answer = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True, capture_output=True, text=True
    )
    words = " ".join(answer.stdout.split())
    if f'platform tag: "{wheel_tag}"' not in words:
        raise SystemExit(f"auditwheel does not find {wheel.name} to be a {wheel_tag} wheel:\n{answer.stdout}")


def make(paths: list[Path], out: Path) -> list[Path]:
    """Write the wheel of every platform into `out`. ValueError when the parts do not fit together."""
    parts = sorted(
        (PythonWheel.read(path) for path in paths), key=lambda part: int(part.interpreter.removeprefix("cp"))
    )
    if len({(part.distribution, part.version) for part in parts}) != 1:
        raise ValueError(f"the parts must be of one distribution and version, got {[path.name for path in paths]}")
    out.mkdir(parents=True, exist_ok=True)
    wheels = []
    for platform in json.loads(PLATFORMS.read_text()).values():
        wheels.append(merge(parts, platform, out))
        if "linux" in platform["wheel_tag"]:
            check_old_systems(wheels[-1], platform["wheel_tag"])
    return wheels


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the wheels of each platform from the parts that were built.")
    parser.add_argument("wheelhouse", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    arguments = parser.parse_args()
    for wheel in make(arguments.parts, arguments.wheelhouse):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
