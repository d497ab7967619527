"""What a kernel wheel holds."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import PurePosixPath

from .errors import KernelUnavailable


@dataclass(frozen=True)
class KernelFiles:
    """One architecture's extension module and its cubins, by the names they are loaded by."""

    extension_name: str
    extension: bytes
    cubins: dict[str, bytes]


def read(wheel: bytes, wheel_name: str, architecture: str) -> KernelFiles:
    """The kernel files of a wheel's bytes. KernelUnavailable when it is not a wheel of this architecture's kernels."""
    package = f"comfy_sage2_{architecture}"
    extensions: dict[str, bytes] = {}
    cubins: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            for member in archive.namelist():
                path = PurePosixPath(member)
                if path.parent != PurePosixPath(package):
                    continue
                if path.suffix in (".so", ".pyd"):
                    extensions[path.name] = archive.read(member)
                elif path.suffix == ".cubin":
                    cubins[path.stem] = archive.read(member)
    except zipfile.BadZipFile as error:
        raise KernelUnavailable(f"{wheel_name} is not a readable wheel: {error}") from error
    if len(extensions) != 1 or not cubins:
        raise KernelUnavailable(
            f"{wheel_name} is not a wheel of {architecture} kernels: expected one extension module and at least one "
            f"cubin in {package}/, got {sorted(extensions)} and {len(cubins)} cubins"
        )
    ((extension_name, extension),) = extensions.items()
    return KernelFiles(extension_name, extension, cubins)
