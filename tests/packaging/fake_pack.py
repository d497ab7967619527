"""A copy of the pack's loader with wheels of the test's making, so that nothing of the real pack is touched."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from packaging.tags import sys_tags

ROOT = Path(__file__).resolve().parent.parent.parent
# Big enough for a tiny disk to be too small for it, and not a real module: importing it fails.
EXTENSION = b"not an extension module\n" * 4096

PREPARE = """
try:
    print(loader.prepare('sm90'))
except loader.KernelUnavailable as error:
    print('unavailable:', error)
"""


def fitting_tag() -> str:
    """The wheel tag that this interpreter likes best."""
    return str(next(iter(sys_tags())))


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

    def add_wheel(
        self, architecture: str = "sm90", tag: str | None = None, extension: bytes = EXTENSION, version: str = "0.1.0"
    ) -> Path:
        """Write a wheel with one extension module and one cubin, and list it in the manifest."""
        package = f"comfy_sage2_{architecture}"
        path = self.wheels / f"{package}-{version}-{tag or fitting_tag()}.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{package}/__init__.py", "")
            archive.writestr(f"{package}/_C.so" if sys.platform != "win32" else f"{package}/_C.pyd", extension)
            archive.writestr(f"{package}/{architecture}_attention.cubin", b"a device image")
            archive.writestr(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\n")
        with (self.wheels / "SHA256SUMS").open("a", newline="\n") as manifest:
            manifest.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
        return path

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
