"""Build the kernel wheels: one run of cibuildwheel, then a wheel for each architecture and one for each platform.

    python -m tools.wheels.build_wheels [--arch sm90 ...] [--only cp312] [--out build/wheelhouse]

Needs cibuildwheel in the Python that runs this script and podman with the image that the packages' pyproject.toml
names (tools/wheels/standin_image.sh makes one). CIBW_CONTAINER_ENGINE and CIBW_MANYLINUX_X86_64_IMAGE select others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import kernel_table
from . import split_wheels
from .stage_package import DEFAULT_FOLDER, ROOT, stage

BUILD = ROOT / "build"


def build(
    architectures: Sequence[str],
    out: Path,
    interpreter: str | None = None,
    cubin_cache: Path | None = None,
    versions: Mapping[str, str] | None = None,
) -> list[Path]:
    """Build the wheels into the folder `out`, with host modules of every CPython, or of `interpreter` ("cp312") only.

    `cubin_cache` keeps the device images of earlier builds; by default all builds in this clone share one. `versions`:
    see `split_wheels.make`. CalledProcessError when a build or a test of a wheel fails.
    """
    tree = stage(architectures, DEFAULT_FOLDER)
    environment = {**os.environ, "CONTAINERS_CONF": str(ROOT / "tools" / "wheels" / "containers.conf")}
    caches = {"ZIG_GLOBAL_CACHE_DIR": BUILD / "zig-cache", "CUBIN_CACHE": cubin_cache or BUILD / "cubin-cache"}
    for variable, cache in caches.items():
        cache.mkdir(parents=True, exist_ok=True)
        # cibuildwheel mounts the host's files in the container under /host.
        environment[variable] = f"/host{cache}"
    if interpreter is not None:
        environment["CIBW_BUILD"] = f"{interpreter}-*"
    with tempfile.TemporaryDirectory() as parts:
        command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", parts, "."]
        subprocess.run(command, cwd=tree, env=environment, check=True)
        return split_wheels.make(sorted(Path(parts).glob("*.whl")), out, versions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the kernel wheels with cibuildwheel.")
    parser.add_argument("--arch", nargs="+", default=kernel_table.names(), choices=kernel_table.names())
    parser.add_argument("--only", metavar="TAG", help="one CPython, such as cp312")
    parser.add_argument("--out", type=Path, default=BUILD / "wheelhouse")
    arguments = parser.parse_args()
    for wheel in build(arguments.arch, arguments.out.resolve(), arguments.only):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
