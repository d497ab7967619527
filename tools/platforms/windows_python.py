"""CPythons for Windows that run in wine, assembled from published parts.

The interpreter's own libraries are python.org's, from the wheels of panda3d. The standard library is that of a CPython
of the same minor version, on this machine or from Debian. python.exe is a few lines of C, compiled with zig. Needs wine
(apt-get install wine64 wine), and pip and ziglang in the Python that runs this module.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from . import debian
from .foreign_python import ForeignPython

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "platforms"
PLATFORM = "win_amd64"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CARRIER = "panda3d==1.10.16"
WINE = {
    "WINEDEBUG": "-all",
    # No menu entries, and no .NET and HTML engine, which wine would ask to install.
    "WINEDLLOVERRIDES": "winemenubuilder.exe=d;mscoree=;mshtml=",
}
FIXED_ADDRESSES = ("setarch", "--addr-no-randomize")
MAIN = """\
#include <wchar.h>
__declspec(dllimport) int Py_Main(int, wchar_t **);
int wmain(int argc, wchar_t **argv) { return Py_Main(argc, argv); }
"""
# wine 8 lacks CopyFile2, which shutil uses when _winapi has it.
SITE_CUSTOMIZATION = """\
import _winapi
if hasattr(_winapi, "CopyFile2"):
    del _winapi.CopyFile2
"""
# wine 8 has no WMI.
_LEFT_OUT_LIBRARIES = ("_tkinter", "_msi", "_wmi", "_test", "xx")
_LEFT_OUT_FOLDERS = (
    "__pycache__", "test", "tests", "idlelib", "site-packages", "dist-packages", "lib-dynload", "config-*",
    "_sysconfigdata*", "sitecustomize.py", "*.so",
)  # fmt: skip


@functools.cache
def wine_command() -> tuple[str, ...]:
    """The command that starts wine, without address randomization where this machine permits that.

    The kernel places a process's heap at random within 1 GiB, which includes the page that Windows shares with every
    process (0x7FFE0000). The heap of one process in some thousands covers that page: wine 8 then ends the process, and
    CreateProcess fails with error 1359.
    """
    try:
        permitted = subprocess.run([*FIXED_ADDRESSES, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        permitted = False
    return (*FIXED_ADDRESSES, "wine") if permitted else ("wine",)


def zig() -> Path:
    """The path of the compiler. SystemExit when ziglang is not installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit(f"ziglang is not installed in {sys.executable}: `make platform-tests` does that")
    return Path(spec.origin).parent / "zig"


def standard_library(version: str, folder: Path) -> Path | None:
    """The folder of the standard library of this minor version: this machine's, else Debian's, else None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    programs = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"{version}.*/bin/python3"))]
    for program in filter(None, programs):
        command = [program, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            return Path(answer.stdout.strip())
    if version in debian.SUITES:
        return debian.python_root(version, "amd64", folder) / "usr" / "lib" / f"python{version}"
    return None


def _carrier(version: str, folder: Path) -> Path:
    """The wheel that contains the interpreter's libraries, downloaded once."""
    downloads = folder / "downloads" / version
    if not downloads.exists():
        partial = downloads.with_name(f".{version}")
        shutil.rmtree(partial, ignore_errors=True)
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
            "--platform", PLATFORM, "--python-version", version, "--dest", str(partial), CARRIER,
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=900)
        partial.rename(downloads)
    (wheel,) = downloads.glob("*.whl")
    return wheel


def _unpack_libraries(wheel: Path, number: str, out: Path) -> None:
    runtime_libraries = (f"python{number}.dll", "vcruntime140.dll", "vcruntime140_1.dll")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            folder, _, name = member.rpartition("/")
            if folder != "deploy_libs" or name.startswith(_LEFT_OUT_LIBRARIES) or f".cp{number}t-" in name:
                continue
            if name.lower() in runtime_libraries:
                (out / name.lower()).write_bytes(archive.read(member))
            elif name.endswith(".pyd") or name.startswith(("libffi", "libcrypto", "libssl", "sqlite3")):
                (out / "DLLs" / name).write_bytes(archive.read(member))


def _compile_program(number: str, out: Path) -> None:
    source, definition, library = out / "main.c", out / "python.def", out / "libpython.a"
    source.write_text(MAIN)
    definition.write_text(f"LIBRARY python{number}.dll\nEXPORTS\nPy_Main\n")
    subprocess.run([zig(), "dlltool", "-m", "i386:x86-64", "-d", definition, "-l", library], check=True)
    command = [str(zig()), "cc", "-target", "x86_64-windows-gnu", "-municode", "-s", "-O3", "-DNDEBUG", "-o"]
    subprocess.run([*command, str(out / "python.exe"), str(source), str(library)], check=True)
    for file in (source, definition, library):
        file.unlink()


def _assemble(version: str, library: Path, out: Path, folder: Path) -> None:
    number = version.replace(".", "")
    (out / "DLLs").mkdir(parents=True)
    _unpack_libraries(_carrier(version, folder), number, out)
    shutil.copytree(library, out / "Lib", ignore=shutil.ignore_patterns(*_LEFT_OUT_FOLDERS))
    (out / "Lib" / "site-packages").mkdir()
    (out / "Lib" / "sitecustomize.py").write_text(SITE_CUSTOMIZATION)
    _compile_program(number, out)


def wine_environment(folder: Path = FOLDER) -> dict[str, str]:
    """The environment variables for wine. Its Windows is in `folder` and reports that it is Windows 10."""
    prefix = folder.resolve() / "wine"
    environment = {**WINE, "WINEPREFIX": str(prefix), "WINEARCH": "win64"}
    if not (prefix / "ready").exists():
        shutil.rmtree(prefix, ignore_errors=True)
        python = ForeignPython(PLATFORM, "", wine_command(), environment)
        python.run("wineboot", "--init")
        completed = python.run("winecfg", "-v", "win10")
        if completed.returncode != 0:
            raise RuntimeError(f"wine does not start: {completed.stderr.strip()}")
        (prefix / "ready").touch()
    return environment


def system_folder(folder: Path = FOLDER) -> Path:
    """The folder of the system libraries of wine's Windows, including the CUDA driver's."""
    return folder.resolve() / "wine" / "drive_c" / "windows" / "system32"


def interpreter(version: str, folder: Path = FOLDER) -> ForeignPython | None:
    """The CPython of this version, one of VERSIONS; None when there is no standard library for it."""
    folder = folder.resolve()
    installed = folder / f"windows-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    if not installed.exists():
        library = standard_library(version, folder)
        if library is None:
            return None
        partial = folder / f".windows-{version}"
        shutil.rmtree(partial, ignore_errors=True)
        _assemble(version, library, partial, folder)
        partial.rename(installed)
    return ForeignPython(PLATFORM, version, (*wine_command(), str(installed / "python.exe")), wine_environment(folder))
