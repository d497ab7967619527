"""The times of this machine's GPUs, kept in one JSON file.

The file is an object of values by key; a key is one text of all that its value depends on. If anything is wrong with
the file, it counts as empty, and the GPU is measured again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.files import replace, user_cache

log = logging.getLogger(__name__)

_MOST_BYTES = 4 << 20
_MOST_ENTRIES = 50  # the times of a GPU take up to 28 kB


@dataclass(frozen=True)
class CacheFile:
    """The file at `path`; None keeps nothing. Readers see a whole file; of two writers at once, one may lose."""

    path: Path | None

    def get(self, key: Mapping[str, str] | None) -> Mapping[str, Any] | None:
        """The value for `key`, which the caller must check; None if there is none or `key` is None."""
        value = None if key is None else self._entries().get(_name(key))
        return value if isinstance(value, dict) else None

    def put(self, key: Mapping[str, str] | None, value: Mapping[str, Any]) -> None:
        """Store `value` for `key`; keep the newest other values. A file that cannot be written stays as it is."""
        if self.path is None or key is None:
            return
        entries = self._entries()
        entries.pop(_name(key), None)
        newest = dict(list(entries.items())[1 - _MOST_ENTRIES :])
        try:
            replace(self.path, json.dumps({**newest, _name(key): value}).encode())
        except (OSError, RecursionError) as error:
            log.debug("%s cannot be written: %s", self.path, error)

    def _entries(self) -> dict[str, Any]:
        """The values by the name of their key, the oldest first."""
        try:
            if self.path is None or not self.path.is_file():  # reading a pipe would wait for its writer
                return {}
            with self.path.open("rb") as file:
                entries = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            log.debug("%s is not used: %s", self.path, error)
            return {}
        return entries if isinstance(entries, dict) else {}


def _name(key: Mapping[str, str]) -> str:
    return json.dumps(key, sort_keys=True)


def user_cache_file() -> CacheFile:
    """The file in the user's cache folder; without such a folder nothing is kept."""
    folder = user_cache()
    return CacheFile(None if folder is None else folder / "comfy_sage2" / "findings.json")
