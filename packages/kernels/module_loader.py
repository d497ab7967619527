"""Puts the host module of this Python in its own place, out of the archive with those of all CPythons.

Five modules that are nearly the same take a third of the space when they are packed as one. An extension module can
only be imported from a file. It is written beside this one, in a folder that is named after the archive, so that a
newer wheel has another one; where that folder cannot be written, into a temporary one.
"""

import hashlib
import importlib.machinery
import importlib.util
import json
import lzma
import os
import sys
import tempfile
from pathlib import Path

ARCHIVE, SIZES = "modules.xz", "modules.json"


def _own(sizes: dict[str, int]) -> str:
    """The name of the module for this Python."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if f"_C{suffix}" in sizes:
            return f"_C{suffix}"
    version = ".".join(map(str, sys.version_info[:2]))
    raise ImportError(
        f"{__package__} has no module for {sys.implementation.name} {version}; it has {', '.join(sizes)}: install a "
        "newer version, or use another Python"
    )


def _write(content: bytes, path: Path) -> None:
    """Whole or not at all: another process may import it at the same time."""
    path.parent.mkdir(exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(partial, 0o755)
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise


def _placed(folder: Path) -> Path:
    """The module's file, which holds what the archive does."""
    archive = (folder / ARCHIVE).read_bytes()
    sizes = json.loads((folder / SIZES).read_text())
    name = _own(sizes)
    names = list(sizes)
    start = sum(sizes[other] for other in names[: names.index(name)])
    content = lzma.decompress(archive)[start : start + sizes[name]]
    path = folder / f"_module-{hashlib.sha256(archive).hexdigest()[:16]}" / name
    try:
        if not (path.is_file() and path.read_bytes() == content):
            _write(content, path)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="comfy_sage2_host-")) / name
        _write(content, path)
    return path


_path = str(_placed(Path(__file__).resolve().parent))
_loader = importlib.machinery.ExtensionFileLoader(__name__, _path)
_spec = importlib.util.spec_from_file_location(__name__, _path, loader=_loader)
assert _spec is not None
_module = importlib.util.module_from_spec(_spec)
_loader.exec_module(_module)
sys.modules[__name__] = _module  # what the import statement gives its caller
