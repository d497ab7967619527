"""The host modules of all CPythons packed as one, as released host wheels have them.

The modules of a platform are nearly the same: one archive of all takes a third of the space of five files that are
packed one by one. packages/kernels/module_loader.py takes the module of a Python out of it, and so does the pack's own
loader.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping

from .stage_package import TEMPLATE

ARCHIVE, SIZES, LOADER = "modules.xz", "modules.json", "_C.py"
MODULES = (".so", ".pyd")
# What the archive needs of a reader's memory, above the bytes of all modules.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 8 * 1024 * 1024}]


def pack(package: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A host package's files with its modules as one. The same files give the same bytes."""
    modules = {name: content for name, content in files.items() if name.endswith(MODULES)}
    sizes = {name.removeprefix(f"{package}/"): len(content) for name, content in modules.items()}
    return {
        **{name: content for name, content in files.items() if name not in modules},
        f"{package}/{ARCHIVE}": lzma.compress(b"".join(modules.values()), filters=_FILTERS),
        f"{package}/{SIZES}": (json.dumps(sizes, indent=0) + "\n").encode(),
        f"{package}/{LOADER}": (TEMPLATE / "module_loader.py").read_bytes(),
    }


def unpack(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A wheel's files with each host module by itself again, as before `pack`."""
    unpacked = dict(files)
    for name in files:
        package, _, file = name.rpartition("/")
        if file != SIZES:
            continue
        modules, at = lzma.decompress(unpacked.pop(f"{package}/{ARCHIVE}")), 0
        for module, size in json.loads(unpacked.pop(name)).items():
            unpacked[f"{package}/{module}"] = modules[at : at + size]
            at += size
        del unpacked[f"{package}/{LOADER}"]
    return unpacked
