"""Compile the host module `_C` with zig: for the interpreter that runs this script, and for every platform.

    python compile_modules.py OUTPUT_FOLDER [-DNAME=VALUE ...] SOURCE [...]

platforms.json, beside this script, says which platforms there are. Needs ziglang and pybind11. CPython's headers are
the same on all of them, but for pyconfig.h: 64-bit Linux shares one, and windows/ holds the one of Windows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).resolve().parent
NUMBER = f"{sys.version_info.major}{sys.version_info.minor}"
# For size: a release has fifteen modules, and what they do takes microseconds at any level.
SIZE = ("-Os", "-ffunction-sections", "-fdata-sections")
OPTIONS = ("-std=c++17", "-DNDEBUG", "-fvisibility=hidden")
_PYTHON_SYMBOL = re.compile(r"PyAPI_(FUNC|DATA)\([^)]*\)+\s*(\w+)")


def _zig() -> Path:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit("the Python package ziglang is needed and not installed")
    return Path(spec.origin).parent / "zig"


def _fix_library_path(zig: Path) -> None:
    """Let zig read its own library under a path that is the same in every build environment.

    zig's cache knows a source again only under the same path, and compiling the C++ library takes a minute a platform.
    """
    link = HERE / "zig-library"
    link.unlink(missing_ok=True)
    link.symlink_to(zig.parent / "lib", target_is_directory=True)
    os.environ["ZIG_LIB_DIR"] = str(link)


def _headers(folder: Path, configuration: Path) -> Path:
    """CPython's headers in `folder`, with this pyconfig.h."""
    # A distribution may keep links to the headers of other packages in the folder.
    shutil.copytree(
        sysconfig.get_path("include"), folder, ignore=lambda _, names: [name for name in names if "linux-gnu" in name]
    )
    shutil.copyfile(configuration, folder / "pyconfig.h")
    return folder


def _linux_configuration() -> Path:
    """pyconfig.h of the interpreter that runs this script; Debian's own only includes the one that is meant."""
    found = Path(sysconfig.get_config_h_filename())
    meant = found.parent / (sysconfig.get_config_var("MULTIARCH") or "") / found.parent.name / found.name
    return meant if meant.is_file() else found


def _import_library(zig: Path, headers: Path, folder: Path) -> Path:
    """An import library of pythonXY.dll with every symbol that CPython's headers declare as one of its own."""
    symbols = set()
    for header in headers.rglob("*.h"):
        for kind, name in _PYTHON_SYMBOL.findall(header.read_text(encoding="utf-8")):
            symbols.add(f"{name} DATA" if kind == "DATA" else name)
    definition = folder / "python.def"
    definition.write_text("\n".join([f"LIBRARY python{NUMBER}.dll", "EXPORTS", *sorted(symbols)]) + "\n")
    library = folder / "libpython.a"
    subprocess.run([zig, "dlltool", "-m", "i386:x86-64", "-d", definition, "-l", library], check=True)
    return library


def _without_time(image: bytes) -> bytes:
    """A Windows image without the time of day that the linker writes into its header."""
    (header,) = struct.unpack_from("<I", image, 0x3C)
    return image[: header + 8] + bytes(4) + image[header + 12 :]


def compile_module(platform: dict[str, str], arguments: list[str]) -> bytes:
    """The module of one platform, of the definitions and sources in `arguments`."""
    zig = _zig()
    windows = "windows" in platform["zig_target"]
    work = HERE / "modules" / platform["zig_target"]
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    configuration = HERE / "windows" / "pyconfig.h" if windows else _linux_configuration()
    headers = _headers(work / "python", configuration)
    shutil.copytree(Path(pybind11.get_include()) / "pybind11", work / "include" / "pybind11")
    libraries = [str(_import_library(zig, headers, work))] if windows else ["-ldl"]
    # Not on Windows: exceptions of modules that zig's LTO has linked are caught nowhere there.
    size = SIZE if windows else (*SIZE, "-flto")
    compiler = [str(zig), "c++", "-target", platform["zig_target"]]
    options = [
        *OPTIONS, *size, *([] if windows else ["-fPIC"]),
        # Nothing of a folder's path may get into the file, or two builds would differ.
        f"-ffile-prefix-map={HERE}=.", f"-ffile-prefix-map={work}=.",
        "-isystem", str(headers), "-isystem", str(work / "include"), "-I", str(HERE / "csrc"),
    ]  # fmt: skip
    definitions = [argument for argument in arguments if argument.startswith("-D")]
    objects: list[str] = []
    for source in arguments[len(definitions) :]:
        objects.append(str(work / f"{len(objects)}-{Path(source).stem}.o"))
        subprocess.run([*compiler, *options, *definitions, "-c", source, "-o", objects[-1]], check=True)
    module = work / platform["module"].format(NUMBER)
    link = [*compiler, *size, "-Wl,--gc-sections", "-shared", "-s", *objects, *libraries, "-o", str(module)]
    subprocess.run(link, check=True)
    image = module.read_bytes()
    return _without_time(image) if windows else image


def main(output: str, *arguments: str) -> None:
    Path(output).mkdir(parents=True, exist_ok=True)
    _fix_library_path(_zig())
    platforms = json.loads((HERE / "platforms.json").read_text()).values()
    with ThreadPoolExecutor() as pool:
        modules = pool.map(lambda platform: compile_module(platform, list(arguments)), platforms)
        for platform, module in zip(platforms, modules, strict=True):
            (Path(output) / platform["module"].format(NUMBER)).write_bytes(module)


if __name__ == "__main__":
    main(*sys.argv[1:])
