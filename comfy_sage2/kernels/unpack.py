"""Putting an extension module on disk, once and whole: the interpreter imports one only from there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from .errors import KernelUnavailable

_log = logging.getLogger(__name__)

_PARTIAL = ".partial-"
_CHANGED = ".changed-"
_ABANDONED_AFTER_SECONDS = 3600.0
_FOLDER_MODE = 0o755
# For which other processes that unpack the same file are waited for, in all folders together: with the reading of the
# wheel, a module that cannot be had has its reason within a second.
_RENAMING_SECONDS = 0.6
# The folder of one wheel's module: its package and the start of its checksum.
_WHEEL_FOLDER = re.compile(r"comfy_sage2_(sm\d+|host)-[0-9a-f]{16}")


@dataclass(frozen=True)
class PlacedModule:
    """A module on disk whose content was compared, kept open: nothing else can take its place while it is.

    Where it is loaded from, `loadable`, is this very file on Linux, even when another one has got its name meanwhile.
    Windows refuses to replace or to change a file that is open like this.
    """

    path: Path
    descriptor: int

    @property
    def loadable(self) -> str:
        """The path to import it by. Use it before `close`."""
        # Under wine a Windows program sees the folder too, and cannot load from there.
        by_descriptor = sys.platform == "linux" and os.path.exists("/proc/self/fd")
        return f"/proc/self/fd/{self.descriptor}" if by_descriptor else str(self.path)

    def close(self) -> None:
        os.close(self.descriptor)


def host_folder(sha256: str) -> str:
    """The name of the folder for the module of a host wheel.

    The checksum keeps versions apart; the wheel's whole name would be long for Windows.
    """
    return f"comfy_sage2_host-{sha256[:16]}"


def user_cache() -> Path | None:
    """The user's cache folder, or None for a user without one."""
    variable, default = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    named = Path(os.environ.get(variable, ""))
    # The XDG specification has relative paths ignored: they would make a folder wherever ComfyUI was started. So would
    # a relative HOME.
    if named.is_absolute():
        return named
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / default if home.is_absolute() else None


def cache_folders() -> tuple[Path, ...]:
    """Where unpacked files may lie, the preferred folder first: the pack's own and the user's cache.

    Windows cannot delete a module that is loaded, so there the pack's folder, which updates and uninstalls, comes last.
    """
    own = Path(__file__).resolve().parent / "_unpacked"
    cache = user_cache()
    if cache is None:
        return (own,)
    user = cache / "comfy_sage2" / "kernels"
    return (user, own) if sys.platform == "win32" else (own, user)


def _open(path: Path) -> int:
    """A descriptor to read the file by. OSError when it cannot be opened or is no regular file."""
    if sys.platform == "win32":
        import _winapi
        import msvcrt

        shared_for_reading = 1  # others may neither write to it nor replace it
        handle = _winapi.CreateFile(str(path), _winapi.GENERIC_READ, shared_for_reading, 0, _winapi.OPEN_EXISTING, 0, 0)
        return msvcrt.open_osfhandle(handle, os.O_RDONLY)
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path.name} is not a regular file")


class _Patience:
    """The seconds for which other processes are still waited for. Time that passes by other work is not counted."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def wait(self) -> bool:
        """Wait for a moment; False, at once, when there is no time left."""
        if self._left <= 0.0:
            return False
        start = time.monotonic()
        time.sleep(0.01)
        self._left -= time.monotonic() - start  # Windows sleeps longer than it is asked to
        return True


def _open_between_renames(path: Path, patience: _Patience) -> int:
    """As `_open`; Windows opens no file at the moment in which another process puts its own in the place."""
    while True:
        try:
            return _open(path)
        except PermissionError:
            if sys.platform != "win32" or not patience.wait():
                raise


def _put_aside(path: Path) -> None:
    """Take a changed module out of the way, for whoever wants to look at it. OSError when that is not possible."""
    aside = path.with_name(_CHANGED + path.name)
    os.replace(path, aside)
    _log.warning(
        "[SA-107] %s was not the file that the bundled wheel holds: it was changed or damaged. It is now %s, and the "
        "module is unpacked anew",
        path,
        aside.name,
    )


def _existing(path: Path, content: bytes, patience: _Patience) -> PlacedModule | None:
    """The module that is there already; one with another content is put aside. OSError when neither can be done."""
    try:
        descriptor = _open_between_renames(path, patience)
    except FileNotFoundError:
        return None
    try:
        # One byte more than wanted: a longer file differs too.
        with os.fdopen(os.dup(descriptor), "rb") as file:
            found = file.read(len(content) + 1)
    except BaseException:
        os.close(descriptor)
        raise
    if found == content:
        return PlacedModule(path, descriptor)
    os.close(descriptor)
    _put_aside(path)
    return None


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left behind. Younger files may belong to a process that is writing them."""
    oldest = time.time() - _ABANDONED_AFTER_SECONDS
    for path in folder.glob(_PARTIAL + "*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _make_folders(folder: Path) -> None:
    """Make a folder and those above it, writable by nobody but the user whatever the umask is."""
    missing = list(takewhile(lambda path: not path.is_dir(), (folder, *folder.parents)))
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(_FOLDER_MODE)


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing: it gets its name only when it is complete."""
    _remove_abandoned(path.parent)
    descriptor, partial = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's file is the owner's alone; another user of the same installation has to read it too.
        os.chmod(partial, 0o755)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _refuse_noexec(folder: Path) -> None:
    """OSError when the folder is on a disk that modules cannot be loaded from."""
    if sys.platform == "linux" and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise OSError("the disk is mounted noexec")


def _place_in(path: Path, content: bytes, patience: _Patience) -> PlacedModule:
    """The file with this content at this path, written unless it is there. OSError when that is not possible."""
    _make_folders(path.parent)
    _refuse_noexec(path.parent)
    placed = _existing(path, content, patience)
    if placed is None:
        _write(path, content)
        placed = _existing(path, content, patience)
    if placed is None:
        raise OSError("it was deleted or changed as soon as it was written")
    return placed


def place(relative: Path, content: bytes, folders: Sequence[Path]) -> PlacedModule:
    """The file with this content at `relative` in the first of `folders` that has it or can take it.

    A file of that name with another content is put aside. Safe to call from several threads and processes at once.
    KernelUnavailable when no folder can take it; the message then says why for each.
    """
    problems = []
    for folder in folders:
        path = folder / relative
        # One that is never readable must not use up the time for the next.
        patience = _Patience(_RENAMING_SECONDS / len(folders))
        try:
            return _place_in(path, content, patience)
        except OSError as error:
            # Windows refuses to replace a module that another process has put there and loaded meanwhile.
            with contextlib.suppress(OSError):
                _refuse_noexec(path.parent)
                placed = _existing(path, content, patience)
                if placed is not None:
                    return placed
            problems.append(f"{path.parent}: {error.strerror or error}")
    raise KernelUnavailable(
        f"[SA-108] the kernel module {relative.name} cannot be unpacked, {'; '.join(problems)}. Free some space or "
        "make one of the folders writable, then restart"
    )


def remove_older(current: str, parts: Sequence[str], folders: Sequence[Path]) -> None:
    """Remove the modules of other wheels of `parts`, architectures or "host", as far as that is possible.

    current: the name that `host_folder` gives to the wheel in use. What another process still uses stays where
    the system does not let it be deleted (Windows); the next update removes it.
    """
    with contextlib.suppress(OSError):
        found = (path for folder in folders for part in parts for path in folder.glob(f"comfy_sage2_{part}-*"))
        for folder in found:
            if not _WHEEL_FOLDER.fullmatch(folder.name) or folder.name == current or folder.is_symlink():
                continue
            for pattern in ("_C.*", f"{_CHANGED}_C.*"):
                for file in folder.glob(pattern):
                    with contextlib.suppress(OSError):
                        file.unlink()
            _remove_abandoned(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
