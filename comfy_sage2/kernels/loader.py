"""Loading the kernel module of an architecture: a pip-installed one, else the wheel that the pack carries."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType

from . import abi, contents, manifest
from .errors import KernelUnavailable
from .unpack import PlacedModule, cache_folders, place, remove_older, wheel_folder

__all__ = ["KernelUnavailable", "fingerprint", "ignored", "load", "prepare", "reason_unavailable"]

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_modules: dict[str, ModuleType] = {}
_failures: dict[str, str] = {}
_reasons: dict[str, str | None] = {}
_ignored: dict[str, str] = {}
_fingerprints: dict[str, str] = {}

# Of the extension module, and of device images, which may be packed.
_BINARY_SUFFIXES = {".so", ".pyd", ".cubin", ".xz"}


def _import_installed(architecture: str) -> ModuleType | None:
    """The pip-installed distribution's module, or None when there is none that can be imported."""
    name = f"comfy_sage2_{architecture}"
    try:
        module = importlib.import_module(name)
        abi.reason_against(module, architecture)  # looks at attributes, which a foreign module may answer with an error
        return module
    except Exception as error:  # a module of that name may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        failure: BaseException = error
    except SystemExit as error:
        failure = error
    _log.warning("the installed kernel module %s cannot be imported, trying the bundled one: %r", name, failure)
    return None


def _unpack_bundled(architecture: str) -> tuple[PlacedModule, contents.KernelFiles]:
    wheel = manifest.find(architecture)
    files = contents.read(wheel.read(), wheel.path.name, architecture)
    folder = wheel_folder(architecture, wheel.sha256)
    folders = cache_folders()
    placed = place(Path(folder) / files.extension_name, files.extension, folders)
    remove_older(folder, folders)
    return placed, files


def _import_bundled(architecture: str) -> ModuleType:
    placed, files = _unpack_bundled(architecture)
    name = f"comfy_sage2_{architecture}._C"
    loader = importlib.machinery.ExtensionFileLoader(name, placed.loadable)
    spec = importlib.machinery.ModuleSpec(name, loader, origin=placed.loadable)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:
        placed.close()
        raise KernelUnavailable(f"[SA-109] the kernel module {placed.path} cannot be imported: {error}") from error
    module.__file__ = str(placed.path)
    # On Linux the descriptor stays open: the dynamic linker would take its number, given to another file, for this one.
    if sys.platform == "win32":
        placed.close()
    reason = abi.reason_against(module, architecture)
    if reason is not None:
        raise KernelUnavailable(
            f"[SA-110] the bundled comfy_sage2_{architecture} ({abi.describe(module)}) is refused: {reason}; update "
            "the pack"
        )
    # The device images go in from the verified wheel itself, so only the host module has to lie on disk.
    for cubin, image in files.cubins.items():
        module.add_cubin(cubin, image)
    return module


def _import(architecture: str) -> ModuleType:
    """The installed module if this library can call it, else the bundled one."""
    module = _import_installed(architecture)
    if module is not None:
        reason = abi.reason_against(module, architecture)
        if reason is None:
            return module
        _ignored[architecture] = (
            f"[SA-110] the installed comfy_sage2_{architecture} ({abi.describe(module)}) is ignored: {reason}; "
            f"`pip uninstall comfy-sage2-{architecture}` removes it"
        )
        _log.warning("%s", _ignored[architecture])
    return _import_bundled(architecture)


def load(architecture: str) -> ModuleType:
    """The kernel module of an architecture such as "sm90"; needs neither torch nor a driver.

    The outcome is kept for the life of the process. Safe to call from several threads.

    Raises:
        KernelUnavailable: there is no module, or it was tampered with, cannot be unpacked or imported, or has
            another ABI than this library.
    """
    with _lock:
        if architecture in _failures:
            raise KernelUnavailable(_failures[architecture])
        if architecture not in _modules:
            try:
                _modules[architecture] = _import(architecture)
            except KernelUnavailable as error:
                _failures[architecture] = str(error)
                raise
        return _modules[architecture]


def ignored(architecture: str) -> str | None:
    """Why `load` passed over the installed module of an architecture, or None when it did not."""
    return _ignored.get(architecture)


def prepare(architecture: str) -> Path:
    """Unpack the bundled wheel of an architecture without importing it, and return the module's path.

    KernelUnavailable as for `load`.
    """
    placed, _ = _unpack_bundled(architecture)
    placed.close()
    return placed.path


def _driver_reason(module: ModuleType) -> str | None:
    try:
        found = module.driver_version()
    except (RuntimeError, ValueError) as error:  # ValueError: the system's text about the driver is not UTF-8
        return f"[SA-101] {error}"
    needed = module.minimum_driver_version
    if found >= needed:
        return None
    return (
        f"[SA-102] the NVIDIA driver is too old: it supports CUDA {found // 1000}.{found % 1000 // 10}, the kernels "
        f"need CUDA {needed // 1000}.{needed % 1000 // 10}; install driver {module.minimum_driver} or newer"
    )


def reason_unavailable(architecture: str) -> str | None:
    """Why the kernels of an architecture cannot run on this machine, or None when they can.

    Covers the module and the driver, not the GPU. The answer is kept for the life of the process.
    """
    with _lock:
        if architecture not in _reasons:
            try:
                _reasons[architecture] = _driver_reason(load(architecture))
            except KernelUnavailable as error:
                _reasons[architecture] = str(error)
        return _reasons[architecture]


def fingerprint(architecture: str) -> str:
    """The SHA-256 that tells one build of an architecture's module from another. KernelUnavailable as for `load`.

    That of the bundled wheel, as the manifest has it, or that of an installed module's files.
    """
    with _lock:
        module = load(architecture)
        if architecture not in _fingerprints:
            installed = module.__name__ == f"comfy_sage2_{architecture}"
            _fingerprints[architecture] = _hash_of_files(module) if installed else manifest.find(architecture).sha256
        return _fingerprints[architecture]


def _hash_of_files(module: ModuleType) -> str:
    """Of the extension module and the device images beside it, by name and content."""
    digest = hashlib.sha256()
    folder = Path(module.__path__[0])
    for path in sorted(path for path in folder.iterdir() if path.suffix in _BINARY_SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()
