"""Loading the kernel module of an architecture: a pip-installed one, else that of the wheels that the pack carries.

A module is made of device images, in a wheel of the architecture, and of the launch code for all architectures, in the
host wheel of the platform. Of several wheels that lie side by side, as in half an update, the newest two that fit each
other and this library are taken.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import logging
import sys
import threading
from functools import cache
from pathlib import Path
from types import ModuleType

from . import abi, contents, manifest
from .errors import REINSTALL, KernelUnavailable
from .manifest import BundledWheel
from .place import cache_folders, place, remove_others

__all__ = ["KernelUnavailable", "bundled_wheels", "fingerprint", "ignored", "load", "reason_unavailable"]

_log = logging.getLogger(__name__)
_lock = threading.RLock()
# The module of an architecture, or why there is none.
_outcomes: dict[str, ModuleType | str] = {}
_ignored: dict[str, str] = {}
# The wheels that a module was made of; none for an installed one.
_wheels: dict[str, tuple[BundledWheel, ...]] = {}
# The bundled launch code, by the checksum of its wheel.
_hosts: dict[str, ModuleType] = {}

# Of the extension module, and of device images, which may be packed, with what they say of themselves.
_BINARY_SUFFIXES = {".so", ".pyd", ".cubin", ".xz", ".json"}


def load(architecture: str) -> ModuleType:
    """The kernel module of an architecture such as "sm90"; needs neither torch nor a driver.

    The outcome is kept for the life of the process. Safe to call from several threads.

    Raises:
        KernelUnavailable: there is no module, or it was tampered with, cannot be unpacked or imported, or has
            another ABI than this library.
    """
    with _lock:
        if architecture not in _outcomes:
            try:
                _outcomes[architecture] = _installed(architecture) or _bundled(architecture)
            except KernelUnavailable as error:
                _outcomes[architecture] = str(error)
        outcome = _outcomes[architecture]
    if isinstance(outcome, str):
        raise KernelUnavailable(outcome)
    return outcome


def _installed(architecture: str) -> ModuleType | None:
    """The pip-installed distribution's module, or None when there is none that this library can call."""
    name = f"comfy_sage2_{architecture}"
    try:
        module = importlib.import_module(name)
        reason = abi.reason_against(module, architecture)
        if reason is None:
            return module
        problem = f"[SA-110] the installed {name} ({abi.describe(module)}) is ignored: {reason}"
    except (Exception, SystemExit) as error:  # a module of that name may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        problem = f"[SA-109] the installed {name} cannot be imported and is ignored: {error!r}"
    _ignored[architecture] = f"{problem}; `pip uninstall comfy-sage2-{architecture}` removes it"
    _log.warning("%s", _ignored[architecture])
    return None


def _bundled(architecture: str) -> ModuleType:
    """The module of the newest wheels that fit each other."""
    images, hosts = manifest.find_all(architecture), manifest.find_all(manifest.HOST)
    first_problem: KernelUnavailable | None = None
    for wheels in itertools.product(images, hosts):
        try:
            module = _assembled(architecture, *wheels)
        except KernelUnavailable as error:
            first_problem = first_problem or error
            continue
        unused = [wheel.path.name for wheel in (*images, *hosts) if wheel not in wheels]
        if unused:
            why = f" ({first_problem})" if first_problem else ""
            _ignored[architecture] = (
                f"[SA-110] beside {' and '.join(wheel.path.name for wheel in wheels)} these wheels are ignored{why}: "
                f"{', '.join(unused)}; {REINSTALL}"
            )
        _wheels[architecture] = wheels
        return module
    assert first_problem is not None  # there is at least one wheel of each
    raise first_problem


def _assembled(architecture: str, images_wheel: BundledWheel, host_wheel: BundledWheel) -> ModuleType:
    """A module of images and launch code. KernelUnavailable when they do not fit together, or this library."""
    build, images = contents.read_images(images_wheel)
    host = _host(host_wheel)
    try:
        kernels = host.Kernels(**build)
    except (TypeError, ValueError) as error:
        raise KernelUnavailable(
            f"[SA-110] the images of {images_wheel.path.name} do not fit the launch code of {host_wheel.path.name}: "
            f"{error}; {REINSTALL}"
        ) from error
    module = ModuleType(f"comfy_sage2_{architecture}")
    module.__file__ = host.__file__
    vars(module).update({name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("_")})
    vars(module).update(version=images_wheel.path.name.split("-")[1])
    reason = abi.reason_against(module, architecture)
    if reason is not None:
        raise KernelUnavailable(
            f"[SA-110] the bundled comfy_sage2_{architecture} ({abi.describe(module)}) is refused: {reason}; update "
            "the pack"
        )
    # The device images go in from the verified wheel itself, so only the host module has to lie on disk.
    for name, image in images.items():
        module.add_cubin(name, image)
    return module


def _host(wheel: BundledWheel) -> ModuleType:
    """The launch code of a wheel, imported from the first folder that it can be written to and imported from."""
    if wheel.sha256 in _hosts:
        return _hosts[wheel.sha256]
    name, content = contents.read_host(wheel)
    code, problems = "SA-108", []
    for folder in cache_folders():
        path = folder / f"comfy_sage2_host-{wheel.sha256[:16]}-{name}"
        try:
            place(path, content)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
            continue
        try:
            _hosts[wheel.sha256] = _execute(path)
        except Exception as error:  # an extension module may raise anything
            code = "SA-109"
            problems.append(f"{path} cannot be imported: {error}")
            continue
        remove_others(path, f"comfy_sage2_host-*-{name}")
        return _hosts[wheel.sha256]
    remedy = {
        "SA-108": "Free some space or make one of the folders writable for this user alone, then restart",
        "SA-109": "Often the folder is mounted noexec, or the system's C library is too old",
    }
    raise KernelUnavailable(
        f"[{code}] the kernel module {name} cannot be loaded: {'; '.join(problems)}. {remedy[code]}"
    )


def _execute(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("comfy_sage2_host._C", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None  # it has a loader
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def ignored(architecture: str) -> str | None:
    """Why `load` passed over an installed module of an architecture or over wheels, or None if it did not."""
    return _ignored.get(architecture)


def bundled_wheels(architecture: str) -> tuple[BundledWheel, ...]:
    """The wheels that a module that was loaded is made of; none for an installed one."""
    return _wheels.get(architecture, ())


@cache
def reason_unavailable(architecture: str) -> str | None:
    """Why the kernels of an architecture cannot run on this machine, or None when they can.

    Covers the module and the driver, not the GPU. The answer is kept for the life of the process.
    """
    try:
        return _driver_reason(load(architecture))
    except KernelUnavailable as error:
        return str(error)


def _driver_reason(module: ModuleType) -> str | None:
    try:
        driver = module.driver_version()
    except (RuntimeError, ValueError) as error:  # ValueError: the system's text about the driver is not UTF-8
        return f"[SA-101] {error}"
    needed = module.minimum_driver_version
    if driver >= needed:
        return None
    return (
        f"[SA-102] the NVIDIA driver is too old: it supports CUDA {driver // 1000}.{driver % 1000 // 10}, the kernels "
        f"need CUDA {needed // 1000}.{needed % 1000 // 10}; install driver {module.minimum_driver} or newer"
    )


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
