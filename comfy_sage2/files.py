"""Files that appear whole or not at all, and folders that only their owner can write to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from itertools import takewhile
from pathlib import Path


def make_folders(folder: Path) -> None:
    """Make a folder and the missing ones above it, writable by their owner alone whatever the umask is."""
    missing = list(takewhile(lambda path: not path.is_dir(), (folder, *folder.parents)))
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o755)


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Write `text` as the file `path`, over an earlier one, with these permissions; its folder is made.

    OSError, and no change at `path`, when it cannot be written. Whoever reads meanwhile sees the old file.
    """
    make_folders(path.parent)
    # A fresh file of an unpredictable name: nobody can have put a link in its place.
    descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, mode)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
