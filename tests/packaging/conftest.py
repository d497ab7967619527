"""The fixtures of the packaging tests."""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from binding import CSRC, MODULE, NATIVE, Binding, build_of, compile_native, definitions
from fake_pack import ROOT, Plugin

from tools import kernel_table


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    root = tmp_path / "plugin"
    shutil.copytree(
        ROOT / "comfy_sage2" / "kernels",
        root / "comfy_sage2" / "kernels",
        ignore=shutil.ignore_patterns("_unpacked", "__pycache__"),
    )
    (root / "comfy_sage2" / "__init__.py").touch()
    shutil.copytree(
        ROOT / "comfy_sage2" / "system",
        root / "comfy_sage2" / "system",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    made = Plugin(root)
    made.wheels.mkdir()
    made.environment = {"XDG_CACHE_HOME": str(made.user_cache), "LOCALAPPDATA": str(made.user_cache)}
    return made


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the whole library with its bytecode, so that no test's process has to compile its copy."""
    folder = tmp_path_factory.mktemp("library") / "comfy_sage2"
    shutil.copytree(ROOT / "comfy_sage2", folder, ignore=shutil.ignore_patterns("_unpacked", "__pycache__"))
    assert compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def pack(plugin: Plugin, library: Path) -> Plugin:
    """A copy of the whole library and install.py."""
    shutil.copyfile(ROOT / "install.py", plugin.root / "install.py")
    shutil.copytree(library, plugin.root / "comfy_sage2", dirs_exist_ok=True)
    return plugin


@pytest.fixture(scope="session")
def mount_namespace() -> tuple[str, ...]:
    """A command prefix that runs a shell which may mount private file systems, or a skip."""
    for prefix in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return (*prefix, "sh", "-c")
    pytest.skip("mounting a file system of the test's own is not permitted here")


@pytest.fixture(scope="session")
def compiler() -> None:
    """A skip if there is none for the sources of csrc/."""
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux to compile csrc/")


@contextmanager
def compiled_once(name: str) -> Iterator[tuple[Path, bool]]:
    """The folder of a build of these sources by this Python, and whether the caller has to make it.

    All processes and later runs share it, because compiling takes a minute.
    """
    sources = sorted((*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h"), *NATIVE.iterdir()))
    state = hashlib.sha256(repr((sys.version, definitions(), [path.read_bytes() for path in sources])).encode())
    builds = ROOT / "build" / "tests"
    builds.mkdir(parents=True, exist_ok=True)
    folder = builds / f"{name}-{state.hexdigest()[:16]}"
    with (builds / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = folder / "complete"
        if complete.exists():
            yield folder, False
            return
        for earlier in builds.glob(f"{name}-*"):
            shutil.rmtree(earlier)
        folder.mkdir()
        yield folder, True
        complete.touch()


@pytest.fixture(scope="session")
def built(compiler: None) -> Path:
    """A folder with the objects common to all modules, the module "package" of native/launch.cpp, and fake drivers."""
    pybind11 = pytest.importorskip("pybind11")
    with compiled_once("binding") as (folder, is_new):
        if not is_new:
            return folder
        includes = ["-I", sysconfig.get_path("include"), "-I", pybind11.get_include(), "-I", str(CSRC)]
        for source in kernel_table.SHARED_SOURCES:
            compile_native(folder / f"{source}.o", *includes, *definitions(), "-c", str(CSRC / source))
        objects = [str(folder / f"{source}.o") for source in kernel_table.SHARED_SOURCES if source != "families.cpp"]
        (folder / "package").mkdir()
        own = ["-shared", "-I", str(CSRC), *objects, str(NATIVE / "launch.cpp")]
        compile_native(folder / "package" / MODULE, *own, "-ldl")
        drivers = {"driver": [], "old_driver": ["-DOLD_DRIVER"], "without_replacing": ["-DNO_REPLACING"]}
        for name, defines in drivers.items():
            (folder / name).mkdir()
            visible = ["-shared", "-fvisibility=default", *defines, str(NATIVE / "fake_driver.cpp")]
            compile_native(folder / name / "libcuda.so.1", *visible)
    return folder


@pytest.fixture(scope="session")
def host(built: Path) -> Path:
    """The folder of the host module of csrc/, for the images of every architecture."""
    with compiled_once("host") as (folder, is_new):
        if is_new:
            objects = [str(built / f"{source}.o") for source in kernel_table.SHARED_SOURCES]
            sources = [str(CSRC / source) for of_family in kernel_table.families().values() for source in of_family]
            compile_native(folder / MODULE, "-shared", "-I", str(CSRC), *objects, *sources, "-ldl")
    return folder


@pytest.fixture(scope="module", params=kernel_table.names())
def architecture(request: pytest.FixtureRequest) -> kernel_table.Architecture:
    return kernel_table.read(request.param)


@pytest.fixture
def kernels_of(host: Path, built: Path, tmp_path: Path) -> Callable[[kernel_table.Architecture], Binding]:
    """Makes the Binding of an architecture with the real launch code and a driver that launches nothing."""

    def make(architecture: kernel_table.Architecture) -> Binding:
        cubins = tuple(cubin.name for cubin in architecture.cubins)
        return Binding(host, tmp_path / "log", built / "driver", cubins=cubins, build=build_of(architecture))

    return make


@pytest.fixture
def kernels(
    kernels_of: Callable[[kernel_table.Architecture], Binding], architecture: kernel_table.Architecture
) -> Binding:
    """The kernels of each architecture."""
    return kernels_of(architecture)


@pytest.fixture
def without_driver(built: Path, tmp_path: Path) -> Binding:
    return Binding(built / "package", tmp_path / "log")


@pytest.fixture
def binding(built: Path, tmp_path: Path) -> Binding:
    return Binding(built / "package", tmp_path / "log", built / "driver")
