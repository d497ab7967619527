"""Files that appear whole or not at all, and folders that only their owner can write to."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

_PARTIAL = ".partial-"
_ABANDONED_SECONDS = 3600.0


def user_cache() -> Path | None:
    """The user's cache folder, or None for a user without one."""
    variable, default = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    named = Path(os.environ.get(variable, ""))
    # Relative paths are ignored, as the XDG specification requires, and so is a relative HOME: each would make a folder
    # wherever ComfyUI was started.
    if named.is_absolute():
        return named
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / default if home.is_absolute() else None


def make_folders(folder: Path) -> None:
    """Make a folder and the missing ones above it, writable only by their owner whatever the umask is."""
    missing = list(takewhile(lambda path: not path.is_dir(), (folder, *folder.parents)))
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o755)


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write `content` to `path` with these permissions, replacing an earlier file; make its folder if it is missing.

    If that fails, raise OSError and leave `path` as it was. Readers see the old file until the new one is whole.
    """
    make_folders(path.parent)
    _remove_abandoned(path.parent)
    # A fresh file with an unpredictable name: nobody can have put a link there.
    descriptor, partial = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(partial, mode)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _remove_abandoned(folder: Path) -> None:
    """Remove files that killed processes left. A younger file may belong to a process that is writing it."""
    for path in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()
