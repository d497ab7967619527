"""The host modules of all CPythons packed into one archive, as in released host wheels.

The modules of a platform are nearly the same, so one archive takes a third of the space of five files packed one by
one. packages/kernels/module_loader.py and the pack's own loader unpack the module of the running Python.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping

from .stage_package import TEMPLATE

ARCHIVE, SIZES, LOADER = "modules.xz", "modules.json", "_C.py"
MODULES = (".so", ".pyd")
# Unpacking needs the dictionary's size in memory, beyond the bytes of all modules.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 8 * 1024 * 1024}]


def pack(package: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A host package's files with its modules in one archive. Equal files give equal bytes."""
    modules = {name: content for name, content in files.items() if name.endswith(MODULES)}
    sizes = {name.removeprefix(f"{package}/"): len(content) for name, content in modules.items()}
    return {
        **{name: content for name, content in files.items() if name not in modules},
        f"{package}/{ARCHIVE}": lzma.compress(b"".join(modules.values()), filters=_FILTERS),
        f"{package}/{SIZES}": (json.dumps(sizes, indent=0) + "\n").encode(),
        f"{package}/{LOADER}": (TEMPLATE / "module_loader.py").read_bytes(),
    }


def unpack(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A wheel's files with each host module as its own file, as before `pack`."""
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
