"""Loads the kernel module of an architecture: a pip-installed one, else one from the wheels that the pack carries.

A module is made of device images, in a wheel of the architecture, and of the launch code for all architectures, in the
host wheel of the platform.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import threading
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from . import bundled
from .bundled import REINSTALL, BundledWheel, KernelUnavailable
from .place import cache_folders, place, remove_others

__all__ = ["KernelUnavailable", "bundled_wheels", "describe", "fingerprint", "ignored", "load", "reason_unavailable"]

ABI_VERSION = 6  # kAbiVersion of csrc/attention_call.h, the major number of csrc/VERSION

_log = logging.getLogger(__name__)
_lock = threading.RLock()
# The module of an architecture, or why there is none.
_outcomes: dict[str, ModuleType | str] = {}
_ignored: dict[str, str] = {}
# The wheels that a module was made of; none for an installed one.
_wheels: dict[str, tuple[BundledWheel, ...]] = {}


def load(architecture: str) -> ModuleType:
    """The kernel module of an architecture such as "sm90", loaded once, without torch or a driver; from any thread.

    KernelUnavailable: there is none, or it is damaged, cannot be unpacked or imported, or has another ABI.
    """
    with _lock:
        if architecture not in _outcomes:
            try:
                _outcomes[architecture] = _installed(architecture) or _assembled(architecture)
            except KernelUnavailable as error:
                _outcomes[architecture] = str(error)
        outcome = _outcomes[architecture]
    if isinstance(outcome, str):
        raise KernelUnavailable(outcome)
    return outcome


def describe(module: ModuleType) -> str:
    return f"version {getattr(module, 'version', 'unknown')}, ABI {getattr(module, 'abi_version', 'unknown')}"


def _reason_against(module: ModuleType, architecture: str) -> str | None:
    """Why this library cannot call `module` as the kernels of `architecture`, or None."""
    if getattr(module, "architecture", None) != architecture:
        return f"it is not a module of {architecture} kernels"
    abi = getattr(module, "abi_version", "unknown")
    return None if abi == ABI_VERSION else f"its ABI is {abi}, this comfy_sage2 needs ABI {ABI_VERSION}"


def _import(architecture: str) -> Any:
    """Import the pip-installed module of an architecture. ModuleNotFoundError where there is none."""
    if architecture == "sm80":
        import comfy_sage2_sm80 as module
    elif architecture == "sm89":
        import comfy_sage2_sm89 as module
    elif architecture == "sm90":
        import comfy_sage2_sm90 as module
    elif architecture == "sm120":
        import comfy_sage2_sm120 as module
    else:
        raise ModuleNotFoundError(f"there are no {architecture} kernels", name=f"comfy_sage2_{architecture}")
    return module


def _installed(architecture: str) -> ModuleType | None:
    """The pip-installed distribution's module, or None when there is none that this library can call."""
    name = f"comfy_sage2_{architecture}"
    try:
        module: ModuleType = _import(architecture)
        reason = _reason_against(module, architecture)
        if reason is None:
            return module
        problem = f"[SA-110] the installed {name} ({describe(module)}) is ignored: {reason}"
    except (Exception, SystemExit) as error:  # a module of that name may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        problem = f"[SA-109] the installed {name} cannot be imported and is ignored: {error!r}"
    _ignored[architecture] = f"{problem}; `pip uninstall comfy-sage2-{architecture}` removes it"
    _log.warning("%s", _ignored[architecture])
    return None


def _assembled(architecture: str) -> ModuleType:
    """A module of bundled images and launch code. KernelUnavailable if they do not fit each other or this library."""
    pairs = product(bundled.fitting(architecture), bundled.fitting(bundled.HOST))
    images_wheel, host_wheel = max(pairs, key=_fit)
    build, images = bundled.read_images(images_wheel)
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
    reason = _reason_against(module, architecture)
    if reason is not None:
        raise KernelUnavailable(
            f"[SA-110] the bundled comfy_sage2_{architecture} ({describe(module)}) is refused: {reason}; update "
            "the pack"
        )
    # The device images come straight from the verified wheel, so only the host module has to lie on disk.
    for name, image in images.items():
        module.add_cubin(name, image)
    _wheels[architecture] = images_wheel, host_wheel
    return module


def _fit(pair: tuple[BundledWheel, BundledWheel]) -> tuple[bool, bool, tuple[int, ...]]:
    """Larger for wheels of the same version, then for a version that this library can call, then for a newer one."""
    images, host = pair
    return images.version == host.version, images.version[0] == ABI_VERSION, images.version


@cache
def _host(wheel: BundledWheel) -> ModuleType:
    """The launch code of a wheel, imported from the first folder where writing and importing it succeed."""
    name, content = bundled.read_host(wheel)
    code, problems = "SA-108", []
    for folder in cache_folders():
        path = folder / f"comfy_sage2_host-{wheel.sha256[:16]}-{name}"
        try:
            place(path, content)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
            continue
        try:
            loader = importlib.machinery.ExtensionFileLoader("comfy_sage2_host._C", str(path))
            spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
            assert spec is not None  # it has a loader
            host = importlib.util.module_from_spec(spec)
            loader.exec_module(host)
        except Exception as error:  # an extension module may raise anything
            code = "SA-109"
            problems.append(f"{path} cannot be imported: {error}")
            continue
        remove_others(path, f"comfy_sage2_host-*-{name}")
        return host
    remedy = {
        "SA-108": "Free some space or make one of the folders writable for this user alone, then restart",
        "SA-109": "Often the folder is mounted noexec, or the system's C library is too old",
    }
    raise KernelUnavailable(
        f"[{code}] the kernel module {name} cannot be loaded: {'; '.join(problems)}. {remedy[code]}"
    )


def ignored(architecture: str) -> str | None:
    """Why `load` passed over an installed module of an architecture, or None if it did not."""
    return _ignored.get(architecture)


def bundled_wheels(architecture: str) -> tuple[BundledWheel, ...]:
    """The wheels that a loaded module was made of; none for an installed one."""
    return _wheels.get(architecture, ())


@cache
def reason_unavailable(architecture: str) -> str | None:
    """Why the module or the driver cannot run the kernels on this machine, or None; checked once in a process."""
    try:
        module = load(architecture)
        driver, needed = module.driver_version(), module.minimum_driver_version
    except KernelUnavailable as error:
        return str(error)
    except (RuntimeError, ValueError) as error:  # ValueError: the system's text about the driver is not UTF-8
        return f"[SA-101] {error}"
    if driver >= needed:
        return None
    return (
        f"[SA-102] the NVIDIA driver is too old: it supports CUDA {driver // 1000}.{driver % 1000 // 10}, the kernels "
        f"need CUDA {needed // 1000}.{needed % 1000 // 10}; install driver {module.minimum_driver} or newer"
    )


@cache
def fingerprint(architecture: str) -> str:
    """A text that identifies a build of a module: the SHA-256 of its wheels, or when an installed one was written."""
    module = load(architecture)
    wheels = bundled_wheels(architecture)
    if wheels:
        return " ".join(wheel.sha256 for wheel in wheels)
    packages = (module, sys.modules.get("comfy_sage2_host"))  # None where a build has both in one module
    folders = [Path(package.__path__[0]) for package in packages if package is not None]
    newest = max(path.stat().st_mtime_ns for folder in folders for path in folder.iterdir() if path.is_file())
    return f"{describe(module)}, {newest}"
