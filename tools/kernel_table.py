"""The table of kernel sources, csrc/architectures.json, as data.

An architecture's entry holds
    targets  the GPU targets it may be compiled for, the usual one first
    hardware the GPUs it is for, in words; says so when it was never run on them
    options  compiler options that nvcc and NVRTC both know
    sources  file names in csrc/; an entry of a .cu file may also be an object with "file", "name" (of the cubin,
             by default the file's stem) and "defines", so that one source can give several cubins
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TABLE = CSRC / "architectures.json"
HOST_SOURCES = ("binding.cpp", "driver.cpp")


@dataclass(frozen=True)
class Cubin:
    """One device image: a source, the name it is loaded by and its preprocessor definitions."""

    source: str
    name: str
    defines: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """What one kernel distribution is built from."""

    name: str
    hardware: str
    targets: tuple[str, ...]
    options: tuple[str, ...]
    cubins: tuple[Cubin, ...]
    host_sources: tuple[str, ...]

    def target(self, wanted: str | None) -> str:
        """The target to compile for: the usual one, or the one asked for. ValueError if the table lacks it."""
        if wanted is None:
            return self.targets[0]
        if wanted not in self.targets:
            raise ValueError(f"{self.name} has the targets {', '.join(self.targets)}, got {wanted}")
        return wanted


def _cubin(entry: str | dict) -> Cubin:
    if isinstance(entry, str):
        entry = {"file": entry}
    unknown = entry.keys() - {"file", "name", "defines"}
    if unknown:
        raise ValueError(f"{TABLE.name}: unknown keys {sorted(unknown)} in the entry of {entry['file']}")
    defines = tuple(f"{name}={value}" for name, value in entry.get("defines", {}).items())
    return Cubin(entry["file"], entry.get("name", Path(entry["file"]).stem), defines)


def names() -> tuple[str, ...]:
    """The architectures of the table."""
    return tuple(json.loads(TABLE.read_text()))


def read(architecture: str) -> Architecture:
    """One architecture's entry. ValueError for a name that the table lacks."""
    table = json.loads(TABLE.read_text())
    if architecture not in table:
        raise ValueError(f"architecture must be one of {', '.join(table)}, got {architecture}")
    entry = table[architecture]
    host = tuple(source for source in entry["sources"] if isinstance(source, str) and source.endswith(".cpp"))
    cubins = tuple(_cubin(source) for source in entry["sources"] if source not in host)
    return Architecture(
        name=architecture,
        hardware=entry["hardware"],
        targets=tuple(entry["targets"]),
        options=tuple(entry["options"]),
        cubins=cubins,
        host_sources=HOST_SOURCES + host,
    )


def version() -> str:
    """The version of the kernel distributions."""
    return (CSRC / "VERSION").read_text().strip()
