"""Compile one CUDA source to a packed cubin with the NVRTC of the nvidia-cuda-nvrtc distribution: no toolkit needed.

    python compile_cubin.py ROOT SOURCE OUTPUT TARGET [OPTION ...]

SOURCE is named from the folder ROOT, and so are the files that it includes.

OUTPUT is an xz file: a third of the size that a wheel's own compression gives. CUDA's own headers come from the
nvidia-cuda-runtime distribution. With CUBIN_CACHE set to a folder, an image is taken from there when the same compiler
has made it from the same sources with the same options: the wheels of several interpreters share their images.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import lzma
import os
import re
import sys
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

# Machine code has instructions of 16 bytes, so what a byte is follows from its place (2^4): 4 % smaller than without.
_PACKING = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 4, "pb": 4}


def _distribution_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(f"the Python package {package} is needed and not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _load_nvrtc() -> ctypes.CDLL:
    folder = _distribution_folder("nvidia.cuda_nvrtc") / "lib"
    # NVRTC opens its builtins by name only, so they are loaded beforehand.
    for builtins in folder.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.12"))


class Program:
    """An NVRTC program, made of one source."""

    def __init__(self, nvrtc: ctypes.CDLL, root: Path, source: str) -> None:
        self._nvrtc = nvrtc
        self._nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._check(
            "nvrtcCreateProgram",
            self._nvrtc.nvrtcCreateProgram(
                ctypes.byref(self._handle), (root / source).read_bytes(), source.encode(), 0, None, None
            ),
        )

    def _check(self, call: str, result: int) -> None:
        if result:
            raise SystemExit(f"{call} failed: {self._nvrtc.nvrtcGetErrorString(result).decode()}")

    def _output(self, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(kind, getattr(self._nvrtc, f"nvrtcGet{kind}Size")(self._handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(kind, getattr(self._nvrtc, f"nvrtcGet{kind}")(self._handle, buffer))
        return buffer.raw[: size.value]

    def compile(self, options: list[str]) -> bytes:
        """The compiled image. Exits with the compiler's log when the source is wrong."""
        encoded = [option.encode() for option in options]
        result = self._nvrtc.nvrtcCompileProgram(self._handle, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        log = self._output("ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if log:
            print(log, file=sys.stderr)
        self._check("nvrtcCompileProgram", result)
        return self._output("CUBIN")


def _own_files(root: Path, source: str) -> list[str]:
    """The source and every file under `root` that it includes, directly or not."""
    found, pending = {source}, [source]
    while pending:
        for name in _INCLUDE.findall((root / pending.pop()).read_text()):
            if name not in found and (root / name).is_file():
                found.add(name)
                pending.append(name)
    return sorted(found)


def _fingerprint(root: Path, source: str, arguments: list[str]) -> str:
    """A name for all that an image is made of: the compiler, its options, the sources and the packing."""
    digest = hashlib.sha256(repr((arguments, _PACKING)).encode())
    for distribution in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"):
        digest.update(importlib.metadata.version(distribution).encode())
    for name in _own_files(root, source):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()


def main(root: str, source: str, output: str, target: str, *options: str) -> None:
    # nvcc infers the execution space of lambdas and constexpr functions in device code; NVRTC has to be told.
    arguments = [f"--gpu-architecture={target}", "-std=c++17", "--device-as-default-execution-space", *options]
    cache = os.environ.get("CUBIN_CACHE")
    cached = Path(cache) / f"{_fingerprint(Path(root), source, arguments)}.cubin.xz" if cache else None
    if cached is not None and cached.exists():
        packed = cached.read_bytes()
    else:
        includes = [Path(root), _distribution_folder("nvidia.cuda_runtime") / "include"]
        program = Program(_load_nvrtc(), Path(root), source)
        image = program.compile([*arguments, *(f"--include-path={folder}" for folder in includes)])
        packed = lzma.compress(image, filters=[_PACKING])
        if cached is not None:
            cached.write_bytes(packed)
    Path(output).write_bytes(packed)


if __name__ == "__main__":
    main(*sys.argv[1:])
