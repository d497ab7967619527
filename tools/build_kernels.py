"""Development build of one architecture's images and of the host module, with nvcc and the machine's C++ compiler.

    python -m tools.build_kernels --arch sm90 --python python3.12
    PYTHONPATH=build/kernels python3.12 -c "import comfy_sage2_sm90"

Needs nvcc and g++ on the PATH, and pybind11 in the Python that runs this script. Compiles only what changed.

    python -m tools.build_kernels --arch sm90 --python python3.12 --images wheels/comfy_sage2_sm90-….whl

compiles only the host module, in seconds and without nvcc, and takes the device images from a wheel. They must fit the
device code in csrc/: the host module refuses images that state another launch interface.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pybind11

from . import kernel_table

ROOT = kernel_table.CSRC.parent


@dataclass(frozen=True)
class Step:
    """One compiler command. It must run when its output is older than an input or came from another command."""

    output: Path
    command: tuple[str, ...]
    depfile: Path

    @property
    def _command_file(self) -> Path:
        return self.depfile.with_suffix(".json")

    def _inputs(self) -> list[Path]:
        listing = self.depfile.read_text().replace("\\\n", " ").split(":", 1)[1]
        return [Path(name) for name in listing.split()]

    def is_done(self) -> bool:
        if not (self.output.exists() and self.depfile.exists() and self._command_file.exists()):
            return False
        if json.loads(self._command_file.read_text()) != list(self.command):
            return False
        built_at = self.output.stat().st_mtime_ns
        return all(path.exists() and path.stat().st_mtime_ns <= built_at for path in self._inputs())

    def run(self) -> None:
        print("compiling", self.output.name, flush=True)
        subprocess.run(self.command, check=True)
        self._command_file.write_text(json.dumps(self.command))


def _nvcc_release(nvcc: str) -> tuple[str, int]:
    """nvcc's version and its major number."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"release \d+\.\d+, V((\d+)\.\d+\.\d+)", text)
    if not match:
        raise SystemExit(f"cannot read the version in the output of {nvcc} --version:\n{text}")
    return match[1], int(match[2])


def _interpreter_paths(python: str) -> tuple[str, str]:
    """Another interpreter's include folder and the suffix of its extension modules."""
    query = "import sysconfig as s; print(s.get_path('include')); print(s.get_config_var('EXT_SUFFIX'))"
    include, suffix = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.split()
    return include, suffix


def _unpack_images(wheel: Path, architecture: kernel_table.Architecture, package: Path) -> set[Path]:
    """Copy a wheel's device images, still compressed, and its BUILD_FILE into the package; return the images' paths.

    SystemExit unless the wheel has exactly the images that csrc/architectures.json lists.
    """
    build = f"{package.name}/{kernel_table.BUILD_FILE}"
    with zipfile.ZipFile(wheel) as archive:
        images = {Path(name).name: name for name in archive.namelist() if name.endswith(".cubin.xz")}
        wanted = {f"{cubin.name}.cubin.xz" for cubin in architecture.cubins}
        if images.keys() != wanted:
            raise SystemExit(
                f"{wheel.name} must hold {', '.join(sorted(wanted))}, but holds {', '.join(sorted(images))}"
            )
        if build not in archive.namelist():
            raise SystemExit(f"{wheel.name} must hold {build}: give a wheel of this architecture")
        for name, member in images.items():
            (package / name).write_bytes(archive.read(member))
        (package / kernel_table.BUILD_FILE).write_bytes(archive.read(build))
    return {package / name for name in wanted}


def _cubin_steps(
    architecture: kernel_table.Architecture, target: str, nvcc: str, package: Path, work: Path
) -> list[Step]:
    steps = []
    for cubin in architecture.cubins:
        output, depfile = package / f"{cubin.name}.cubin", work / f"{cubin.name}.d"
        command = (
            # Relaxed constexpr: device code calls constexpr functions from headers that host code includes too.
            nvcc, "-cubin", f"-arch={cubin.target(target)}", "-std=c++17", "--expt-relaxed-constexpr",
            *(f"-D{define}" for define in cubin.defines),
            *(f"--ptxas-options={option}" for option in architecture.ptxas_options), "-I", str(kernel_table.CSRC),
            "-MD", "-MF", str(depfile), "-o", str(output), str(kernel_table.CSRC / cubin.source),
        )  # fmt: skip
        steps.append(Step(output, command, depfile))
    return steps


def _host_steps(python: str, package: Path, work: Path) -> list[Step]:
    """The steps that compile the host module; the last one links it."""
    include, suffix = _interpreter_paths(python)
    objects = work / suffix.strip(".")
    objects.mkdir(parents=True, exist_ok=True)
    common = ("g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden")
    definitions = [f"-D{name}={value}" for name, value in kernel_table.host_defines("g++").items()]
    steps = []
    for source in kernel_table.host_sources():
        output = objects / f"{source.replace('/', '_')}.o"
        depfile = output.with_suffix(".d")
        command = (
            *common, *definitions,
            "-isystem", include, "-isystem", pybind11.get_include(), "-I", str(kernel_table.CSRC),
            "-MD", "-MF", str(depfile), "-c", "-o", str(output), str(kernel_table.CSRC / source),
        )  # fmt: skip
        steps.append(Step(output, command, depfile))
    inputs = [str(step.output) for step in steps]
    module = package / f"_C{suffix}"
    depfile = objects / "_C.d"
    depfile.write_text(f"{module.name}: {' '.join(inputs)}\n")
    link = (
        "g++", "-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL",
        "-o", str(module), *inputs, "-ldl",
    )  # fmt: skip
    return [*steps, Step(module, link, depfile)]


def _nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("nvcc is not on the PATH: install a CUDA toolkit, 12.8 or newer, or give --images")
    return nvcc


def build(name: str, target: str | None, out: Path, *, python: str | None, images: Path | None, jobs: int) -> Path:
    """Update one architecture's package and the host module's package; return the architecture's folder.

    Args:
        target: one of the architecture's targets; None for its first.
        python: the interpreter to build the host module for; None does not build it.
        images: a wheel to take the device images from; None compiles them.
        jobs: how many compilers run at once.

    ValueError for an unknown architecture or target, CalledProcessError when a compiler fails.
    """
    architecture = kernel_table.read(name)
    target = architecture.target(target)
    package, work = out / f"comfy_sage2_{name}", out / f".work-{name}"
    host_package = out / "comfy_sage2_host"
    for folder in (package, work, host_package):
        folder.mkdir(parents=True, exist_ok=True)

    if images is None:
        nvcc = _nvcc()
        release, major = _nvcc_release(nvcc)
        toolchain, driver = f"nvcc {release}", kernel_table.oldest_driver(architecture, major)
        cubins = _cubin_steps(architecture, target, nvcc, package, work)
        wanted = {step.output for step in cubins}
        build_info = kernel_table.build_info(architecture, target=target, toolchain=toolchain, driver=driver)
        (package / kernel_table.BUILD_FILE).write_text(json.dumps(build_info))
    else:
        cubins = []
        wanted = _unpack_images(images, architecture, package)
    for stale in set(package.glob("*.cubin*")) - wanted:
        stale.unlink()
    host = [] if python is None else _host_steps(python, host_package, out / ".work-host")
    compile_steps = [step for step in (*cubins, *host[:-1]) if not step.is_done()]
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(Step.run, compile_steps):
            pass
    for step in host[-1:]:
        if not step.is_done():
            step.run()
    for source, folder in (("images.py", package), ("host.py", host_package)):
        shutil.copyfile(ROOT / "packages" / "kernels" / source, folder / "__init__.py")
    return package


def main() -> None:
    parser = argparse.ArgumentParser(description="Development build of one architecture's kernels with nvcc.")
    parser.add_argument("--arch", required=True, choices=kernel_table.names())
    parser.add_argument("--target", help="one of the architecture's targets (default: its first)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "kernels")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--images", type=Path, help="a wheel to take the device images from, instead of nvcc")
    module = parser.add_mutually_exclusive_group()
    module.add_argument("--python", default=sys.executable, help="the interpreter to build the host module for")
    module.add_argument("--cubins-only", action="store_true", help="do not build the host module")
    options = parser.parse_args()
    python, out = None if options.cubins_only else options.python, options.out.resolve()
    print(build(options.arch, options.target, out, python=python, images=options.images, jobs=options.jobs))


if __name__ == "__main__":
    main()
