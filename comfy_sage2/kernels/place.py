"""Puts an extension module on disk: the interpreter imports one only from there."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import time
from pathlib import Path

from ..system.files import make_folders, replace, user_cache

_log = logging.getLogger(__name__)

# Windows can open or replace no file while another process does so, nor a file that is loaded.
_PAUSES = (0.05, 0.1, 0.2) if sys.platform == "win32" else ()


def cache_folders() -> tuple[Path, ...]:
    """The pack's own folder and the user's cache; on Windows, which cannot delete a loaded module, the cache first."""
    pack_folder = Path(__file__).resolve().parent / "_unpacked"
    cache = user_cache()
    if cache is None:
        return (pack_folder,)
    user_folder = cache / "comfy_sage2" / "kernels"
    return (user_folder, pack_folder) if sys.platform == "win32" else (pack_folder, user_folder)


def place(path: Path, content: bytes) -> None:
    """Make `path` a file with exactly `content` that only this user and root can change, or raise OSError.

    A file that is already like that stays. Several processes may call this at once.
    """
    make_folders(path.parent)
    if _others_may_change(path.parent.stat()):
        raise OSError("other users own this folder or may write to it")
    for pause in (*_PAUSES, None):
        try:
            if not _is_placed(path, content):
                replace(path, content, 0o755)  # other users of the same installation read it too
            break
        except PermissionError:
            if pause is None:
                raise
            time.sleep(pause)
    if not _is_placed(path, content):
        raise OSError("the file changes as soon as it is written, or other users may write to it")


def _is_placed(path: Path, content: bytes) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISREG(status.st_mode) and not _others_may_change(status) and path.read_bytes() == content:
        return True
    _log.warning("[SA-107] %s was changed or damaged, or other users may change it: it is unpacked again", path)
    return False


def _others_may_change(status: os.stat_result) -> bool:
    """Whether a user other than this one and root owns a file or folder, or may write to it; False on Windows."""
    return sys.platform != "win32" and (status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & 0o022))


def remove_others(path: Path, pattern: str) -> None:
    """Remove the other files of `pattern` beside `path`, except on Windows those that a process still uses."""
    for other in path.parent.glob(pattern):
        if other != path:
            with contextlib.suppress(OSError):
                other.unlink()
