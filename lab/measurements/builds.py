"""Builds of the kernels that a command is told of: folders of kernel packages, loaded beside the installed ones.

Such as `comfy_sage2_sm90` of an unpacked wheel, or of build/kernels (docs/dev/releasing.md). Nothing is verified before
it is loaded: name only builds that you made or trust.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Build:
    """A kernel package and what the tables call it."""

    name: str
    folder: Path

    @classmethod
    def parse(cls, text: str) -> Build:
        """From "after=build/after/comfy_sage2_sm80". A type of argument."""
        name, separator, folder = text.partition("=")
        if not (name and separator and folder):
            raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text[:60]!r}")
        return cls(name, Path(folder))


def shown(builds: Sequence[Build]) -> str:
    """The arguments for these builds, without where they lie on this machine."""
    return " ".join(f"--build {shlex.quote(f'{build.name}=FOLDER')}" for build in builds)


def load(folder: Path, number: int) -> ModuleType:
    """The kernel package in `folder`, under a name of its own. SystemExit where there is none that can be imported."""
    source = folder / "__init__.py"
    if not source.is_file():
        raise SystemExit(f"{folder} is no kernel package: it has no __init__.py")
    name = f"comfy_sage2_build_{number}"
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for what it imports from itself
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"{folder} cannot be imported: {error}") from error
    return module
