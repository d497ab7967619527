"""Build the kernel wheels with cibuildwheel: one run per architecture, one wheel per CPython.

    python -m tools.wheels.build_wheels [--arch sm90 ...] [--only cp312] [--out build/wheelhouse]

Needs cibuildwheel in the Python that runs this script and podman with the image that the packages' pyproject.toml
names (tools/wheels/standin_image.sh makes one). CIBW_CONTAINER_ENGINE and CIBW_MANYLINUX_X86_64_IMAGE choose others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from .. import kernel_table
from .stage_package import ROOT, default_folder, stage


def build(architecture: str, out: Path, interpreter: str | None = None, *, reuse_cubins: bool = True) -> None:
    """Put one architecture's wheels into the folder `out`: for every CPython, or for one tag such as "cp312".

    Without `reuse_cubins` every device source is compiled, whatever earlier builds have left.
    CalledProcessError when a build or a test of a wheel fails.
    """
    tree = stage(architecture, default_folder(architecture))
    environment = {**os.environ, "CONTAINERS_CONF": str(ROOT / "tools" / "wheels" / "containers.conf")}
    if sys.platform == "linux":
        caches = {"ZIG_GLOBAL_CACHE_DIR": "zig-cache"} | ({"CUBIN_CACHE": "cubin-cache"} if reuse_cubins else {})
        for variable, folder in caches.items():
            cache = ROOT / "build" / folder
            cache.mkdir(parents=True, exist_ok=True)
            # cibuildwheel shows the host's files inside the container under /host.
            environment[variable] = f"/host{cache}"
    if interpreter is not None:
        environment["CIBW_BUILD"] = f"{interpreter}-*"
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "auto", "--output-dir", str(out), "."]
    subprocess.run(command, cwd=tree, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the kernel wheels with cibuildwheel.")
    parser.add_argument("--arch", nargs="+", default=kernel_table.names(), choices=kernel_table.names())
    parser.add_argument("--only", metavar="TAG", help="one CPython, such as cp312")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheelhouse")
    arguments = parser.parse_args()
    for architecture in arguments.arch:
        build(architecture, arguments.out.resolve(), arguments.only)


if __name__ == "__main__":
    main()
