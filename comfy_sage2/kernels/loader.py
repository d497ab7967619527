"""Loading the kernel module of an architecture: a pip-installed one, else that of the wheels that the pack carries.

A module is made of device images, in a wheel of the architecture, and of the launch code for all architectures, in the
host wheel of the platform.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from . import abi, contents, manifest
from .errors import REINSTALL, KernelUnavailable, shortened
from .unpack import PlacedModule, cache_folders, host_folder, place, remove_older

__all__ = ["KernelUnavailable", "bundled_wheels", "fingerprint", "ignored", "load", "prepare", "reason_unavailable"]

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_modules: dict[str, ModuleType] = {}
_failures: dict[str, str] = {}
_ignored: dict[str, str] = {}
# The wheels that a module was made of; none for an installed one.
_wheels: dict[str, tuple[manifest.BundledWheel, ...]] = {}
# The bundled launch code, by the checksum of its wheel.
_hosts: dict[str, ModuleType] = {}

_MOST_OF_A_REFUSAL = 400  # letters of what the launch code says, which may quote the images' build

# Of the extension module, and of device images, which may be packed, with what they say of themselves.
_BINARY_SUFFIXES = {".so", ".pyd", ".cubin", ".xz", ".json"}


def _import_installed(architecture: str) -> ModuleType | None:
    """The pip-installed distribution's module, or None when there is none that can be imported."""
    name = f"comfy_sage2_{architecture}"
    try:
        module = importlib.import_module(name)
        # Both look at attributes, which a foreign module may answer with an error.
        abi.reason_against(module, architecture)
        abi.describe(module)
        return module
    except Exception as error:  # a module of that name may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        failure: BaseException = error
    except SystemExit as error:
        failure = error
    _log.warning("the installed kernel module %s cannot be imported, trying the bundled one: %r", name, failure)
    _ignored[architecture] = (
        f"[SA-109] the installed {name} cannot be imported and is ignored: {failure!r}; "
        f"`pip uninstall comfy-sage2-{architecture}` removes it"
    )
    return None


@dataclass(frozen=True)
class _Bundled:
    """The wheels of an architecture's images and of the host, the images, and the host module on disk."""

    images_wheel: manifest.BundledWheel
    host_wheel: manifest.BundledWheel
    images: contents.Images
    placed: PlacedModule


def _newest(part: str) -> manifest.BundledWheel:
    """The wheel of an architecture or of the host that is used; others that fit are noted."""
    wheel, *older = manifest.find_all(part)
    if older:
        _ignored[part] = (
            f"[SA-110] {', '.join(other.path.name for other in older)} lies beside {wheel.path.name} and is ignored: "
            + REINSTALL
        )
    return wheel


def _unpack_bundled(architecture: str) -> _Bundled:
    images_wheel = _newest(architecture)
    images = contents.read_images(images_wheel.read(), images_wheel.path.name, architecture)
    host_wheel = _newest(manifest.HOST)
    host = contents.read_host(host_wheel.read(), host_wheel.path.name)
    folder, folders = host_folder(host_wheel.sha256), cache_folders()
    placed = place(Path(folder) / host.name, host.content, folders)
    # Before 5.0.0 each architecture had modules of its own.
    remove_older(folder, [manifest.HOST, architecture], folders)
    return _Bundled(images_wheel, host_wheel, images, placed)


def _execute(name: str, placed: PlacedModule) -> ModuleType:
    """The extension module, imported. KernelUnavailable when it cannot be."""
    loader = importlib.machinery.ExtensionFileLoader(name, placed.loadable)
    spec = importlib.machinery.ModuleSpec(name, loader, origin=placed.loadable)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:
        placed.close()
        raise KernelUnavailable(
            f"[SA-109] the kernel module {placed.path} cannot be imported: {error}. Often its folder is mounted "
            "noexec, or the system's C library is too old"
        ) from error
    module.__file__ = str(placed.path)
    # On Linux the descriptor stays open: the dynamic linker would take its number, given to another file, for this one.
    if sys.platform == "win32":
        placed.close()
    return module


def _with_images(architecture: str, bundled: _Bundled) -> ModuleType:
    """A module of the images and the launch code. KernelUnavailable when they do not fit together."""
    images, host_wheel = bundled.images, bundled.host_wheel
    host = _hosts.get(host_wheel.sha256)
    if host is None:
        host = _hosts[host_wheel.sha256] = _execute("comfy_sage2_host._C", bundled.placed)
    else:
        bundled.placed.close()
    reason = abi.reason_against_images(images.build.get("abi_version"), host)
    if reason is None:
        try:
            kernels = host.Kernels(**images.build)
        except (TypeError, ValueError) as error:
            reason = shortened(str(error), _MOST_OF_A_REFUSAL)
    if reason is not None:
        raise KernelUnavailable(
            f"[SA-110] the images of {bundled.images_wheel.path.name} do not fit the launch code of "
            f"{host_wheel.path.name}: {reason}; {REINSTALL}"
        )
    module = ModuleType(f"comfy_sage2_{architecture}")
    module.__file__ = host.__file__
    vars(module).update({name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("_")})
    vars(module).update(version=bundled.images_wheel.path.name.split("-")[1])
    return module


def _import_bundled(architecture: str) -> ModuleType:
    bundled = _unpack_bundled(architecture)
    module = _with_images(architecture, bundled)
    reason = abi.reason_against(module, architecture)
    if reason is not None:
        raise KernelUnavailable(
            f"[SA-110] the bundled comfy_sage2_{architecture} ({abi.describe(module)}) is refused: {reason}; update "
            "the pack"
        )
    # The device images go in from the verified wheel itself, so only the host module has to lie on disk.
    for cubin, image in bundled.images.cubins.items():
        module.add_cubin(cubin, image)
    _wheels[architecture] = (bundled.images_wheel, bundled.host_wheel)
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
    """Why `load` passed over an installed module of an architecture or over an older wheel, or None if it did not."""
    found = (_ignored.get(part) for part in (architecture, manifest.HOST))
    return "; ".join(reason for reason in found if reason is not None) or None


def bundled_wheels(architecture: str) -> tuple[manifest.BundledWheel, ...]:
    """The wheels that a module that was loaded is made of; none for an installed one."""
    return _wheels.get(architecture, ())


def prepare(architecture: str) -> Path:
    """Unpack the host module for an architecture's bundled wheel without importing it, and return its path.

    KernelUnavailable as for `load`.
    """
    placed = _unpack_bundled(architecture).placed
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


@cache
def reason_unavailable(architecture: str) -> str | None:
    """Why the kernels of an architecture cannot run on this machine, or None when they can.

    Covers the module and the driver, not the GPU. The answer is kept for the life of the process.
    """
    try:
        return _driver_reason(load(architecture))
    except KernelUnavailable as error:
        return str(error)


@cache
def fingerprint(architecture: str) -> str:
    """The SHA-256 that tells one build of an architecture's module from another. KernelUnavailable as for `load`.

    That of the bundled wheels, by their sums in the manifest, or that of an installed module's files.
    """
    module = load(architecture)
    sums = "".join(wheel.sha256 for wheel in bundled_wheels(architecture))
    return hashlib.sha256(sums.encode()).hexdigest() if sums else _hash_of_files(module)


def _hash_of_files(module: ModuleType) -> str:
    """Of the extension module and the device images, by name and content."""
    digest = hashlib.sha256()
    host = sys.modules.get("comfy_sage2_host")  # None where a build has both in one module
    folders = [Path(package.__path__[0]) for package in (module, host) if package is not None]
    files = (path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _BINARY_SUFFIXES)
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()
