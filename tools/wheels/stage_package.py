"""Write out the source tree that all kernels are built from, ready for pip, build or cibuildwheel.

    python -m tools.wheels.stage_package
    python -m build --wheel build/packages

The tree holds everything that the wheels are made of and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import string
from collections.abc import Sequence
from pathlib import Path

from .. import kernel_table

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATE = ROOT / "packages" / "kernels"
HOST = "comfy_sage2_host"
PACKAGE_FILES = (
    "CMakeLists.txt",
    "README.md",
    "check_wheel.py",
    "compile_cubin.py",
    "compile_modules.py",
    "platforms.json",
)


def tool_version(distribution: str) -> str:
    """The exact version of a build requirement."""
    project = (TEMPLATE / "pyproject.toml.in").read_text()
    match = re.search(rf'"{re.escape(distribution)}==([^"]+)"', project)
    if match is None:
        raise ValueError(f"pyproject.toml.in names no exact version of {distribution}")
    return match[1]


def build_info(architecture: kernel_table.Architecture) -> str:
    """The text of an architecture's BUILD_FILE."""
    info = kernel_table.build_info(
        architecture,
        target=architecture.target(None),
        toolchain=f"NVRTC {tool_version('nvidia-cuda-nvrtc-cu12')}",
        # This NVRTC belongs to CUDA 12, and images from any 12.x compiler load on any 12.x driver.
        driver=architecture.minimum_driver,
    )
    return json.dumps(info, indent=2) + "\n"


def _quoted(define: str) -> str:
    """A preprocessor definition as an argument of a CMake command."""
    return '"-D' + define.replace('"', '\\"') + '"'


def _cmake_description(architectures: Sequence[kernel_table.Architecture]) -> str:
    defines = kernel_table.host_defines(f"zig {tool_version('ziglang')}").items()
    lines = [
        f"set(HOST_SOURCES {' '.join(kernel_table.host_sources())})",
        f"set(HOST_DEFINES {' '.join(_quoted(f'{name}={value}') for name, value in defines)})",
    ]
    lines += [line for architecture in architectures for line in cubin_lines(architecture)]
    return "\n".join(lines) + "\n"


def cubin_lines(architecture: kernel_table.Architecture) -> list[str]:
    """The CMake commands that compile the images of an architecture."""
    assembler = [f"--ptxas-options={option}" for option in architecture.ptxas_options]
    lines = []
    for cubin in architecture.cubins:
        options = [*(f"-D{define}" for define in cubin.defines), *assembler]
        words = [architecture.name, cubin.target(architecture.target(None)), cubin.name, cubin.source, *options]
        lines.append(f"kernel_cubin({' '.join(words)})")
    return lines


def stage(names: Sequence[str], out: Path) -> Path:
    """Write the tree of the architectures `names` to the folder `out`, replacing what is there, and return `out`.

    ValueError for an unknown architecture or one without device sources.
    """
    architectures = [kernel_table.read(name) for name in names]
    for architecture in architectures:
        if not architecture.cubins:
            raise ValueError(
                f"{kernel_table.TABLE.name} lists no device sources for {architecture.name}: there is nothing to ship"
            )
    if out.exists():
        shutil.rmtree(out)
    packages = {HOST: "host.py", **{f"comfy_sage2_{name}": "images.py" for name in names}}
    for package, source in packages.items():
        (out / "src" / package).mkdir(parents=True)
        shutil.copyfile(TEMPLATE / source, out / "src" / package / "__init__.py")
    for architecture in architectures:
        package_folder = out / "src" / f"comfy_sage2_{architecture.name}"
        (package_folder / kernel_table.BUILD_FILE).write_text(build_info(architecture))
    for file in PACKAGE_FILES:
        shutil.copyfile(TEMPLATE / file, out / file)
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    shutil.copytree(TEMPLATE / "windows", out / "windows")
    shutil.copytree(kernel_table.CSRC, out / "csrc", ignore=shutil.ignore_patterns("*.md", ".*"))
    (out / "kernels.cmake").write_text(_cmake_description(architectures))
    project = string.Template((TEMPLATE / "pyproject.toml.in").read_text())
    values = {"version": kernel_table.version(), "packages": '", "'.join(f"src/{name}" for name in packages)}
    (out / "pyproject.toml").write_text(project.substitute(values))
    return out


DEFAULT_FOLDER = ROOT / "build" / "packages"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write out the source tree of the kernel distributions.")
    parser.add_argument("--arch", nargs="+", default=kernel_table.names(), choices=kernel_table.names())
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER)
    arguments = parser.parse_args()
    print(stage(arguments.arch, arguments.out))


if __name__ == "__main__":
    main()
