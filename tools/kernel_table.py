"""The table of kernel builds, csrc/architectures.json, as data.

A family is one set of sources:
    host_sources     C++ files in csrc/ beside those that every build has
    cubins           name of the device image -> its "source" in csrc/, its "defines", and its "targets": target of a
                     build -> what it is compiled for in that build

An architecture is one build of a family, and one kernel distribution:
    family           whose sources it compiles
    hardware         the GPUs it is for, in words; says so when it was never run on them
    capabilities     compute capabilities that it runs on, "major.minor"
    modes            "8b", "4b" and "precise", as it has them
    pv_formats       "fp8", "fp16", "int8", "mxfp8", likewise: what P and V of 8b and 4b are rounded to, best first
    pv_accumulators  "fp32" and "fp16", likewise
    minimum_driver   the oldest driver branch that can run it, one of DRIVER_CUDA_VERSIONS
    targets          GPU targets that it may be compiled for, the usual one first
    cubins           as a family has them, beside those of the family
    defines          preprocessor definitions for its device code and its host code: what it can do
    ptxas_options    what the assembler is told for its device code
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TABLE = CSRC / "architectures.json"
# Every build has them. The shared ones take no definitions: all builds compile them alike.
SHARED_SOURCES = ("binding.cpp", "block_selection.cpp", "driver.cpp", "launch_list.cpp", "plan.cpp")
BUILD_SOURCES = ("build_info.cpp",)
# Driver branch -> the CUDA version that its first release supports, as the driver gives it: 1000 * major + 10 * minor.
DRIVER_CUDA_VERSIONS = {"525": 12000, "570": 12080, "580": 13000}

_FAMILY_KEYS = {"host_sources", "cubins"}
_CUBIN_KEYS = {"source", "defines", "targets"}
_ARCHITECTURE_KEYS = {
    "family", "hardware", "capabilities", "modes", "pv_formats", "pv_accumulators", "minimum_driver", "targets",
    "cubins", "defines", "ptxas_options",
}  # fmt: skip


@dataclass(frozen=True)
class Cubin:
    """One device image: a source, the name it is loaded by and its preprocessor definitions, "NAME=value"."""

    source: str
    name: str
    defines: tuple[str, ...]
    targets: tuple[tuple[str, str], ...] = ()

    def target(self, of_build: str) -> str:
        """What it is compiled for in a build for a target."""
        return dict(self.targets).get(of_build, of_build)


@dataclass(frozen=True)
class Architecture:
    """What one kernel distribution is built from, and what it can do."""

    name: str
    hardware: str
    capabilities: tuple[tuple[int, int], ...]
    modes: tuple[str, ...]
    pv_formats: tuple[str, ...]
    pv_accumulators: tuple[str, ...]
    minimum_driver: str
    targets: tuple[str, ...]
    defines: tuple[str, ...]  # of the host code; the cubins have them among theirs
    ptxas_options: tuple[str, ...]  # of all cubins
    cubins: tuple[Cubin, ...]
    host_sources: tuple[str, ...]  # beside SHARED_SOURCES

    def target(self, wanted: str | None) -> str:
        """The target to compile for: the usual one, or the one asked for. ValueError if the table lacks it."""
        if wanted is None:
            return self.targets[0]
        if wanted not in self.targets:
            raise ValueError(f"{self.name} has the targets {', '.join(self.targets)}, got {wanted}")
        return wanted


def oldest_driver(architecture: Architecture, compiler_major: int) -> str:
    """The oldest driver branch for an architecture's images when a CUDA compiler of this major version makes them."""
    of_compiler = next(branch for branch, cuda in DRIVER_CUDA_VERSIONS.items() if cuda >= compiler_major * 1000)
    return max(architecture.minimum_driver, of_compiler, key=DRIVER_CUDA_VERSIONS.__getitem__)


def _keys(entry: Mapping[str, Any], known: set[str], what: str, optional: frozenset[str] = frozenset()) -> None:
    """ValueError unless the entry has all known keys and no other."""
    unknown, missing = sorted(entry.keys() - known), sorted(known - optional - entry.keys())
    if unknown:
        raise ValueError(f"{TABLE.name}: unknown keys {unknown} in {what}")
    if missing:
        raise ValueError(f"{TABLE.name}: missing keys {missing} in {what}")


def _defines(values: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in values.items())


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def names() -> tuple[str, ...]:
    """The architectures of the table."""
    return tuple(json.loads(TABLE.read_text())["architectures"])


def read(architecture: str) -> Architecture:
    """One architecture's entry. ValueError for a name that the table lacks, or an entry with wrong keys."""
    table = json.loads(TABLE.read_text())
    if architecture not in table["architectures"]:
        raise ValueError(f"architecture must be one of {', '.join(table['architectures'])}, got {architecture}")
    entry = table["architectures"][architecture]
    _keys(entry, _ARCHITECTURE_KEYS, architecture, frozenset({"cubins"}))
    family = table["families"][entry["family"]]
    _keys(family, _FAMILY_KEYS, f"the family {entry['family']}")
    defines = _defines(entry["defines"])
    cubins = []
    for name, cubin in (family["cubins"] | entry.get("cubins", {})).items():
        _keys(cubin, _CUBIN_KEYS, f"the cubin {name}", frozenset({"defines", "targets"}))
        own, targets = _defines(cubin.get("defines", {})), tuple(cubin.get("targets", {}).items())
        cubins.append(Cubin(cubin["source"], name, (*own, *defines), targets))
    return Architecture(
        name=architecture,
        hardware=entry["hardware"],
        capabilities=tuple(_capability(text) for text in entry["capabilities"]),
        modes=tuple(entry["modes"]),
        pv_formats=tuple(entry["pv_formats"]),
        pv_accumulators=tuple(entry["pv_accumulators"]),
        minimum_driver=entry["minimum_driver"],
        targets=tuple(entry["targets"]),
        defines=defines,
        ptxas_options=tuple(entry["ptxas_options"]),
        cubins=tuple(cubins),
        host_sources=(*BUILD_SOURCES, *family["host_sources"]),
    )


def build_info(architecture: Architecture, *, target: str, toolchain: str, driver: str) -> dict[str, str]:
    """What csrc/build_info.cpp takes of a build, as preprocessor definitions.

    driver: the oldest branch that runs the build, one of DRIVER_CUDA_VERSIONS.
    """
    capabilities = (f"{major}.{minor}" for major, minor in architecture.capabilities)
    texts = {
        "ARCHITECTURE": architecture.name,
        "TARGET": target,
        "VERSION": version(),
        "TOOLCHAIN": toolchain,
        "MINIMUM_DRIVER": driver,
        "MODES": ",".join(architecture.modes),
        "PV_FORMATS": ",".join(architecture.pv_formats),
        "PV_ACCUMULATORS": ",".join(architecture.pv_accumulators),
        "CAPABILITIES": ",".join(capabilities),
    }
    return {
        **{f"KERNEL_{name}": f'"{text}"' for name, text in texts.items()},
        "KERNEL_MINIMUM_DRIVER_VERSION": str(DRIVER_CUDA_VERSIONS[driver]),
    }


def version() -> str:
    """The version of the kernel distributions."""
    return (CSRC / "VERSION").read_text().strip()
