"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Write `text` as the file `path`, over an earlier one, with these permissions; its folder is made.

    OSError, and no change at `path`, when it cannot be written. Whoever reads meanwhile sees the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
