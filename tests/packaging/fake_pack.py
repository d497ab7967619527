"""A copy of the pack's loader with wheels that the test makes, so that the real pack stays untouched."""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import lzma
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from comfy_sage2.kernels.bundled import HOST
from comfy_sage2.kernels.loader import ABI_VERSION

ROOT = Path(__file__).resolve().parent.parent.parent
ABI = ABI_VERSION
# Not a real module: importing it fails.
EXTENSION = b"not an extension module\n" * 4096
OWN_MODULE = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace("linux", "manylinux_2_17")


def manifest_line(name: str, content: bytes) -> str:
    """The manifest's line about a wheel."""
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n"


def release(folder: Path) -> None:
    """Write the manifest of the wheels in a folder."""
    lines = (manifest_line(path.name, path.read_bytes()) for path in sorted(folder.glob("*.whl")))
    (folder / "SHA256SUMS").write_text("".join(lines), newline="\n")


def write_images(
    folder: Path, architecture: str = "sm90", version: str = "0.1.0", platform: str = "any", **build: object
) -> Path:
    """A wheel with one image and its build info, listed in the folder's manifest."""
    build_info = {"abi_version": ABI, "architecture": architecture, **build}
    files = {"attention.cubin.xz": lzma.compress(b"a device image"), "build.json": json.dumps(build_info).encode()}
    return write_wheel(folder, architecture, version, platform, files)


def write_host(folder: Path, version: str = "0.1.0", extension: bytes = EXTENSION) -> Path:
    """A wheel with three host modules, this Python's in the middle, listed in the folder's manifest."""
    modules = {"_C.cpython-27-x86_64-linux-gnu.so": b"an older one", OWN_MODULE: extension, "_C.pyd.none": b"another"}
    files = {
        "modules.xz": lzma.compress(b"".join(modules.values())),
        "modules.json": json.dumps({name: len(module) for name, module in modules.items()}).encode(),
    }
    return write_wheel(folder, HOST, version, PLATFORM, files)


def write_wheel(folder: Path, part: str, version: str, platform: str, files: Mapping[str, bytes]) -> Path:
    package = f"comfy_sage2_{part}"
    path = folder / f"{package}-{version}-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"__init__.py": b"", **files}.items():
            archive.writestr(f"{package}/{name}", content)
        archive.writestr(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\n")
    release(folder)
    return path


@dataclass
class Plugin:
    """A folder laid out like the pack: comfy_sage2/kernels and wheels/, with a user cache beside it."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def unpacked(self) -> Path:
        return self.root / "comfy_sage2" / "kernels" / "_unpacked"

    @property
    def user_cache(self) -> Path:
        return self.root.parent / "cache"

    @property
    def site(self) -> Path:
        """Where pip would put packages."""
        return self.root / "site"

    @property
    def preferred(self) -> Path:
        """Where modules are unpacked if every folder is writable: on Windows the user's cache."""
        return self.user_cache / "comfy_sage2" / "kernels" if sys.platform == "win32" else self.unpacked

    def add_wheels(self, architecture: str = "sm90", extension: bytes = EXTENSION, version: str = "0.1.0") -> Path:
        """Write a wheel of images and the host wheel; returns the images'."""
        write_host(self.wheels, version, extension)
        return write_images(self.wheels, architecture, version)

    def unpacked_files(self) -> list[Path]:
        """All files in the pack's own cache and in the user's."""
        return sorted(
            path for folder in (self.unpacked, self.user_cache) for path in folder.rglob("*") if path.is_file()
        )

    def command(self, code: str) -> list[str]:
        """A fresh interpreter that has the loader, and no torch."""
        head = "import sys; sys.modules['torch'] = None\nfrom comfy_sage2.kernels import loader\n"
        return [sys.executable, "-c", f"{head}{code}"]

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def start(self, code: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*prefix, *self.command(code)],
            env={**self.full_environment(), "PYTHONPATH": os.pathsep.join(map(str, (self.root, self.site)))},
            cwd=self.root,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, code: str, prefix: tuple[str, ...] = ()) -> str:
        """What the code prints. The test fails when it exits with an error."""
        process = self.start(code, prefix)
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        return output.strip()

    def loaded(self, prefix: tuple[str, ...] = ()) -> Path:
        """The file of the sm90 module that a fresh process has loaded."""
        return Path(self.run("print(loader.load('sm90').__file__)", prefix))

    def reason(self, architecture: str = "sm90") -> str:
        return self.run(f"print(loader.reason_unavailable({architecture!r}))")
