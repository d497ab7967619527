"""The table of kernel builds, csrc/architectures.json, as data.

The host module serves all architectures: it is compiled from SHARED_SOURCES and the host sources of every family.

A family is one set of sources:
    host_sources     C++ files in csrc/ with its launch code
    cubins           name of the device image -> its "source" in csrc/, its "defines", and its "targets": target of a
                     build -> target that this image is compiled for in that build

An architecture is one build of a family's device images, and one distribution of them:
    family           whose sources it compiles
    hardware         the GPUs it is for, in words, with a note when it was never run on them
    capabilities     compute capabilities that it runs on, "major.minor"
    modes            those of "8b", "4b" and "precise" that it has
    pv_formats       likewise of "fp8", "fp16", "int8" and "mxfp8": the formats of P and V in 8b and 4b, best first
    pv_accumulators  likewise of "fp32" and "fp16"
    minimum_driver   the oldest driver branch that can run it, one of DRIVER_CUDA_VERSIONS
    targets          GPU targets that it may be compiled for, the default first
    cubins           device images that it has beside those of its family
    defines          preprocessor definitions for its device code: what it can do
    ptxas_options    assembler options for its device code
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TABLE = CSRC / "architectures.json"
SHARED_SOURCES = (
    "binding.cpp", "block_selection.cpp", "block_selection_binding.cpp", "driver.cpp", "families.cpp",
    "launch_list.cpp", "plan.cpp", "plan_binding.cpp",
)  # fmt: skip
_SHARED_LAUNCHES = ("block_selection.cpp",)  # the launch code of kernels that every family has
# This file lies beside the device images and describes their build.
BUILD_FILE = "build.json"
# Driver branch -> the CUDA version that its first release supports, as drivers report it: 1000 * major + 10 * minor.
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
        """The target that this image is compiled for in a build for the target `of_build`."""
        return dict(self.targets).get(of_build, of_build)


@dataclass(frozen=True)
class Architecture:
    """What the device images of one distribution are built from, and what they can do."""

    name: str
    family: str
    hardware: str
    capabilities: tuple[tuple[int, int], ...]
    modes: tuple[str, ...]
    pv_formats: tuple[str, ...]
    pv_accumulators: tuple[str, ...]
    minimum_driver: str
    targets: tuple[str, ...]
    defines: tuple[str, ...]  # each cubin's defines include them
    ptxas_options: tuple[str, ...]  # of all cubins
    cubins: tuple[Cubin, ...]

    def target(self, wanted: str | None) -> str:
        """The target to compile for: `wanted`, or the default for None. ValueError if the table lacks `wanted`."""
        if wanted is None:
            return self.targets[0]
        if wanted not in self.targets:
            raise ValueError(f"{self.name} has the targets {', '.join(self.targets)}, got {wanted}")
        return wanted


def oldest_driver(architecture: Architecture, compiler_major: int) -> str:
    """The oldest driver branch that runs an architecture's images from a CUDA compiler of this major version."""
    compiler_branch = next(branch for branch, cuda in DRIVER_CUDA_VERSIONS.items() if cuda >= compiler_major * 1000)
    return max(architecture.minimum_driver, compiler_branch, key=DRIVER_CUDA_VERSIONS.__getitem__)


def _check_keys(entry: Mapping[str, Any], known: set[str], what: str, optional: frozenset[str] = frozenset()) -> None:
    """ValueError when the entry has an unknown key, or lacks a known one that is not optional."""
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
    _check_keys(entry, _ARCHITECTURE_KEYS, architecture, frozenset({"cubins"}))
    family = table["families"][entry["family"]]
    _check_keys(family, _FAMILY_KEYS, f"the family {entry['family']}")
    defines = _defines(entry["defines"])
    cubins = []
    for name, cubin in (family["cubins"] | entry.get("cubins", {})).items():
        _check_keys(cubin, _CUBIN_KEYS, f"the cubin {name}", frozenset({"defines", "targets"}))
        cubin_defines, targets = _defines(cubin.get("defines", {})), tuple(cubin.get("targets", {}).items())
        cubins.append(Cubin(cubin["source"], name, (*cubin_defines, *defines), targets))
    return Architecture(
        name=architecture,
        family=entry["family"],
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
    )


def families() -> dict[str, tuple[str, ...]]:
    """The families of the table, each with its host sources."""
    return {name: tuple(family["host_sources"]) for name, family in json.loads(TABLE.read_text())["families"].items()}


def host_sources() -> tuple[str, ...]:
    """The files in csrc/ that the host module is compiled from."""
    return (*SHARED_SOURCES, *(source for sources in families().values() for source in sources))


def _without_comments(source: str) -> str:
    return " ".join(re.sub(r"//[^\n]*", "", source).split())


def launch_interface(family: str) -> str:
    """16 digits that identify the interface between a family's launch code and its device images.

    A hash of the launch sources and of the headers that they share with device code, without comments and line ends.
    The host module refuses images with another hash (csrc/binding.cpp).
    """
    headers = [path for folder in ("common", family) for path in sorted((CSRC / folder).glob("*.h"))]
    digest = hashlib.sha256()
    for path in (*headers, *(CSRC / source for source in (*_SHARED_LAUNCHES, *families()[family]))):
        digest.update(_without_comments(path.read_text()).encode() + b"\0")
    return digest.hexdigest()[:16]


def host_defines(toolchain: str) -> dict[str, str]:
    """The preprocessor definitions that tell the host module's sources about the build."""
    interfaces = {f"{family.upper()}_LAUNCH_INTERFACE": f'"{launch_interface(family)}"' for family in families()}
    return {"HOST_TOOLCHAIN": f'"{toolchain}"', **interfaces}


def build_info(architecture: Architecture, *, target: str, toolchain: str, driver: str) -> dict[str, Any]:
    """The content of BUILD_FILE, which describes device images; csrc/build_info.h explains the fields.

    driver: the oldest branch that runs the build, one of DRIVER_CUDA_VERSIONS.
    """
    return {
        "abi_version": abi_version(),
        "architecture": architecture.name,
        "family": architecture.family,
        "launch_interface": launch_interface(architecture.family),
        "target": target,
        "toolchain": toolchain,
        "minimum_driver": driver,
        "minimum_driver_version": DRIVER_CUDA_VERSIONS[driver],
        "modes": architecture.modes,
        "pv_formats": architecture.pv_formats,
        "pv_accumulators": architecture.pv_accumulators,
        "capabilities": architecture.capabilities,
        "half_values": "HALF_VALUES=1" in architecture.defines,
    }


def abi_version() -> int:
    """kAbiVersion of csrc/attention_call.h: the first number of the version."""
    return int(version().partition(".")[0])


def version() -> str:
    """The version of distributions built from csrc/ now."""
    return (CSRC / "VERSION").read_text().strip()
