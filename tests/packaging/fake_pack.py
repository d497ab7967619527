"""A copy of the pack's loader with wheels of the test's making, so that nothing of the real pack is touched."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.tags import sys_tags

from comfy_sage2.kernels.abi import ABI_VERSION
from comfy_sage2.kernels.manifest import HOST

ROOT = Path(__file__).resolve().parent.parent.parent
# Big enough for a tiny disk to be too small for it, and not a real module: importing it fails.
EXTENSION = b"not an extension module\n" * 4096

PREPARE = """
try:
    print(loader.prepare('sm90'))
except loader.KernelUnavailable as error:
    print('unavailable:', error)
"""

Build = Mapping[str, object] | None  # fields of build.json that are others than usual


def fitting_tag() -> str:
    """The wheel tag that this interpreter likes best."""
    return str(next(iter(sys_tags())))


def manifest_lines(name: str, content: bytes, size: int | None = None) -> str:
    """What the manifest says of a wheel; `size`: another one than it has."""
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n# {name} has {size or len(content)} bytes\n"


@dataclass
class Plugin:
    """A folder laid out as the pack is: comfy_sage2/kernels and wheels/, with a user cache beside it."""

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
    def preferred(self) -> Path:
        """Where modules are unpacked when every folder can be written: on Windows in the user's cache."""
        return self.user_cache / "comfy_sage2" / "kernels" if sys.platform == "win32" else self.unpacked

    def add_wheels(
        self, architecture: str = "sm90", extension: bytes = EXTENSION, version: str = "0.1.0", build: Build = None
    ) -> Path:
        """Write a wheel of images and the host wheel, and list both in the manifest; returns the images'."""
        self.add_host(version, extension)
        return self.add_images(architecture, version, build=build)

    def add_images(
        self, architecture: str = "sm90", version: str = "0.1.0", tag: str = "py3-none-any", build: Build = None
    ) -> Path:
        """Write a wheel with one image and what is said of it unless that is None, and list it in the manifest."""
        said = {"abi_version": ABI_VERSION, "architecture": architecture, **(build or {})}
        known = json.dumps({name: value for name, value in said.items() if value is not None})
        files = {"attention.cubin.xz": lzma.compress(b"a device image"), "build.json": known.encode()}
        return self._add(architecture, version, tag, files)

    def add_host(self, version: str = "0.1.0", extension: bytes = EXTENSION) -> Path:
        """Write a wheel with the host module of this Python alone, and list it in the manifest."""
        name = "_C.pyd" if sys.platform == "win32" else "_C.so"
        files = {"modules.xz": lzma.compress(extension), "modules.json": json.dumps({name: len(extension)}).encode()}
        return self._add(HOST, version, f"py3-none-{fitting_tag().rpartition('-')[2]}", files)

    def _add(self, part: str, version: str, tag: str, files: Mapping[str, bytes]) -> Path:
        package = f"comfy_sage2_{part}"
        path = self.wheels / f"{package}-{version}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {"__init__.py": b"", **files}.items():
                archive.writestr(f"{package}/{name}", content)
            archive.writestr(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\n")
        self.add_to_manifest(path)
        return path

    def add_to_manifest(self, wheel: Path, size: int | None = None) -> None:
        """Add the lines about a wheel to the manifest."""
        content = wheel.read_bytes()
        with (self.wheels / "SHA256SUMS").open("a", newline="\n") as manifest:
            manifest.write(manifest_lines(wheel.name, content, size))

    def unpacked_files(self) -> list[Path]:
        """All files in the pack's own cache and in the user's."""
        return sorted(
            path for folder in (self.unpacked, self.user_cache) for path in folder.rglob("*") if path.is_file()
        )

    def command(self, code: str) -> list[str]:
        """A fresh interpreter that has the loader, as `kernels`, and no torch."""
        return [sys.executable, "-c", f"import sys; sys.modules['torch'] = None\nfrom kernels import loader\n{code}"]

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def start(self, code: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*prefix, *self.command(code)],
            env={**self.full_environment(), "PYTHONPATH": str(self.root / "comfy_sage2")},
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

    def prepare(self, prefix: tuple[str, ...] = ()) -> str:
        """Unpack the sm90 wheel in a fresh process: the module's path, or the reason why there is none."""
        return self.run(PREPARE, prefix)

    def reason(self, architecture: str = "sm90") -> str:
        return self.run(f"print(loader.reason_unavailable({architecture!r}))")
