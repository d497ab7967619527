"""Putting an extension module on disk, once and whole: the interpreter imports one only from there."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .errors import KernelUnavailable

_PARTIAL = ".partial-"
_ABANDONED_AFTER_SECONDS = 3600.0


def user_cache() -> Path | None:
    """The user's cache folder, or None for a user without a home."""
    variable, default = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    named = os.environ.get(variable)
    if named:
        return Path(named)
    try:
        return Path.home() / default
    except RuntimeError:
        return None


def cache_folders() -> tuple[Path, ...]:
    """Where unpacked files may lie, the preferred folder first: the pack's own, then the user's cache."""
    own = Path(__file__).resolve().parent / "_unpacked"
    user = user_cache()
    return (own,) if user is None else (own, user / "comfy_sage2" / "kernels")


def _matches(path: Path, content: bytes) -> bool:
    """Whether the file is there. KernelUnavailable when its content is another one."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return False
    if found != content:
        raise KernelUnavailable(
            f"{path} is refused: it is not the file that the bundled wheel holds, so it was changed or damaged. "
            f"Delete it and restart"
        )
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left behind. Younger files may belong to a process that is writing them."""
    oldest = time.time() - _ABANDONED_AFTER_SECONDS
    for path in folder.glob(_PARTIAL + "*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing: it gets its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def place(relative: Path, content: bytes, folders: Sequence[Path]) -> Path:
    """The path of a file with this content at `relative` in the first of `folders` that has it or can take it.

    Safe to call from several threads and processes at once. KernelUnavailable when a file of that name has another
    content, or when no folder can take it; the message then says why for each.
    """
    problems = []
    for folder in folders:
        path = folder / relative
        try:
            if _matches(path, content):
                return path
            _write(path, content)
        except OSError as error:
            # Windows refuses to replace a module that another process has put there and loaded meanwhile.
            with contextlib.suppress(OSError):
                if _matches(path, content):
                    return path
            problems.append(f"{path.parent}: {error.strerror or error}")
            continue
        return path
    raise KernelUnavailable(
        f"the kernel module {relative.name} cannot be unpacked, {'; '.join(problems)}. Free some space or make one of "
        f"the folders writable, then restart"
    )
