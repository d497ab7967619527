"""What was found out about this machine's GPUs, kept in one JSON file so that it need not be found out again.

The file is a convenience: where it is missing, damaged, of another format or not writable, nothing is known and nothing
is kept, and nobody is told.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import replace_text
from ..kernels.unpack import user_cache

log = logging.getLogger(__name__)

_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 200
_LONGEST = 200  # characters of a name or a value of a key


@dataclass(frozen=True)
class CacheFile:
    """The file at `path`; None keeps nothing.

    An entry has a key, names with texts, and a value, which must be what JSON can hold. Several processes may read and
    write at once: each sees a whole file, and of two that write at the same moment one may lose its entry.
    """

    path: Path | None

    def get(self, key: Mapping[str, str]) -> Mapping[str, Any] | None:
        """The value that was kept for `key`, from outside and to be checked by the caller; None when there is none."""
        return next((entry["value"] for entry in self._entries() if entry["key"] == dict(key)), None)

    def put(self, key: Mapping[str, str], value: Mapping[str, Any]) -> None:
        """Keep `value` for `key`; of too many entries the oldest go."""
        if self.path is None:
            return
        others = [entry for entry in self._entries() if entry["key"] != dict(key)]
        text = _text([*others, {"key": dict(key), "value": dict(value)}])
        try:
            replace_text(self.path, text)
        except OSError as error:
            log.debug("%s cannot be written: %s", self.path, error)

    def _entries(self) -> list[dict[str, Any]]:
        """The entries of the file that are well-formed, the oldest first."""
        if self.path is None:
            return []
        try:
            if not self.path.is_file():  # reading a pipe would wait for its writer
                return []
            with self.path.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
            document = json.loads(content) if len(content) <= _MOST_BYTES else None
        except (OSError, ValueError, RecursionError) as error:
            log.debug("%s is not used: %s", self.path, error)
            return []
        if not isinstance(document, dict) or document.get("format") is True or document.get("format") != _FORMAT:
            return []  # True is 1, too
        entries = document.get("findings")
        return [entry for entry in entries if _is_entry(entry)] if isinstance(entries, list) else []


def _text(entries: list[dict[str, Any]]) -> str:
    """The file with the newest of `entries`, an entry a line: as many as a file may have that is read."""
    lines: list[str] = []
    left = _MOST_BYTES - 100  # for what stands around them
    for entry in reversed(entries[-_MOST_ENTRIES:]):
        try:
            line = json.dumps(entry)
        except RecursionError:  # some versions of Python read what is nested more deeply than they write it
            continue
        left -= len(line) + 2
        if left < 0 and lines:
            break
        lines.append(line)
    return f'{{"format": {_FORMAT}, "findings": [\n' + ",\n".join(reversed(lines)) + "\n]}\n"


def user_cache_file() -> CacheFile:
    """The file in the user's folder for caches; without one nothing is kept."""
    folder = user_cache()
    return CacheFile(None if folder is None else folder / "comfy_sage2" / "findings.json")


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"key", "value"}:
        return False
    key = entry["key"]
    return (
        isinstance(key, dict)
        and isinstance(entry["value"], dict)
        and all(isinstance(text, str) and len(text) <= _LONGEST for pair in key.items() for text in pair)
    )
