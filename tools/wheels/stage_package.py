"""Write out the source tree of one architecture's kernel distribution, ready for pip, build or cibuildwheel.

    python -m tools.wheels.stage_package --arch sm90
    python -m build --wheel build/packages/sm90

The tree holds everything that the wheel is made of and nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import string
from pathlib import Path

from .. import kernel_table

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE_FILES = (
    "CMakeLists.txt",
    "README.md",
    "check_wheel.py",
    "compile_cubin.py",
    "compile_modules.py",
    "platforms.json",
)


def _cmake_description(architecture: kernel_table.Architecture) -> str:
    lines = [
        f"set(KERNEL_ARCHITECTURE {architecture.name})",
        f"set(KERNEL_TARGET {architecture.target(None)})",
        f"set(SHARED_SOURCES {' '.join(kernel_table.SHARED_SOURCES)})",
        f"set(HOST_SOURCES {' '.join(architecture.host_sources)})",
        f"set(HOST_DEFINES {' '.join(architecture.defines)})",
        # NVRTC is of CUDA 12, and images of every 12.x compiler load on every 12.x driver.
        f"set(KERNEL_MINIMUM_DRIVER {architecture.minimum_driver})",
        f"set(KERNEL_MINIMUM_DRIVER_VERSION {kernel_table.DRIVER_CUDA_VERSIONS[architecture.minimum_driver]})",
        f"set(KERNEL_MODES {','.join(architecture.modes)})",
        f"set(KERNEL_PV_FORMATS {','.join(architecture.pv_formats)})",
        f"set(KERNEL_PV_ACCUMULATORS {','.join(architecture.pv_accumulators)})",
        f"set(KERNEL_CAPABILITIES {','.join(f'{major}.{minor}' for major, minor in architecture.capabilities)})",
    ]
    for cubin in architecture.cubins:
        options = [f"-D{define}" for define in cubin.defines]
        options += [f"--ptxas-options={option}" for option in architecture.ptxas_options]
        lines.append(
            " ".join(["kernel_cubin(" + cubin.name, cubin.source, cubin.target(architecture.target(None)), *options])
            + ")"
        )
    return "\n".join(lines) + "\n"


def stage(name: str, out: Path) -> Path:
    """Write the tree of architecture `name` to the folder `out`, replacing what is there, and return `out`.

    ValueError for an unknown architecture or one without device sources.
    """
    architecture = kernel_table.read(name)
    if not architecture.cubins:
        raise ValueError(f"{kernel_table.TABLE.name} lists no device sources for {name}: there is nothing to ship")
    if out.exists():
        shutil.rmtree(out)
    package = out / "src" / f"comfy_sage2_{name}"
    package.mkdir(parents=True)
    template = ROOT / "packages" / "kernels"
    shutil.copyfile(template / "__init__.py", package / "__init__.py")
    for file in PACKAGE_FILES:
        shutil.copyfile(template / file, out / file)
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    shutil.copytree(template / "windows", out / "windows")
    shutil.copytree(kernel_table.CSRC, out / "csrc", ignore=shutil.ignore_patterns("*.md", ".*"))
    (out / "architecture.cmake").write_text(_cmake_description(architecture))
    project = string.Template((template / "pyproject.toml.in").read_text())
    values = {"architecture": name, "hardware": architecture.hardware, "version": kernel_table.version()}
    (out / "pyproject.toml").write_text(project.substitute(values))
    return out


def default_folder(name: str) -> Path:
    """Where the tree of an architecture is staged unless another folder is asked for."""
    return ROOT / "build" / "packages" / name


def main() -> None:
    parser = argparse.ArgumentParser(description="Write out the source tree of one kernel distribution.")
    parser.add_argument("--arch", required=True, choices=kernel_table.names())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(stage(arguments.arch, arguments.out or default_folder(arguments.arch)))


if __name__ == "__main__":
    main()
