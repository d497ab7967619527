"""Policies as files in a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..files import replace_text
from ..text import check_file_name
from .calibrated import Policy
from .document import LONGEST, from_text, to_text

SUFFIX = ".json"


def policy_path(folder: Path, name: str) -> Path:
    """The file of the policy called `name` in `folder`; raises ValueError for anything but a plain name."""
    name = check_file_name(name, SUFFIX)
    path = folder / (name + SUFFIX)
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"[SA-405] file {name!r} is a link out of {folder}; replace it by the policy itself")
    return path


def save_policy(policy: Policy, folder: Path, name: str) -> Path:
    """Write `policy` as `name` in `folder`, over an earlier one of that name; the file appears all at once."""
    path = policy_path(folder, name)
    replace_text(path, to_text(policy), 0o644)
    return path


def read_policy_text(folder: Path, name: str) -> str:
    """The text of the policy file `name` in `folder`; ValueError when there is none, with the names that are there."""
    path = policy_path(folder, name)
    if not path.is_file():
        there = ", ".join(sorted(entry.stem for entry in folder.glob(f"*{SUFFIX}"))) if folder.is_dir() else ""
        raise ValueError(f"[SA-406] there is no policy {path.stem!r} in {folder}; there are: {there or 'none'}")
    if path.stat().st_size > 4 * LONGEST:
        raise ValueError(f"[SA-406] {path} has {path.stat().st_size} bytes, too many for a policy")
    try:
        return path.read_text(encoding="utf-8-sig")  # an editor may have put a byte order mark before it
    except UnicodeDecodeError as error:
        raise ValueError(
            f"[SA-406] {path} is not UTF-8 text ({error}): save it as UTF-8, or make the policy again"
        ) from error


def load_policy(folder: Path, text: str, name: str) -> Policy:
    """The policy in `text`, or in the file `name` of `folder`; exactly one of them must be given."""
    if bool(text.strip()) == bool(name.strip()):
        given = "both" if text.strip() else "neither"
        raise ValueError(f"[SA-407] give the policy either as text or as the name of a file, got {given}")
    return from_text(text if text.strip() else read_policy_text(folder, name))


def fingerprint(folder: Path, text: str, name: str) -> str:
    """Changes when the policy that `text` or `name` gives does; `load_policy` reports a file that cannot be read."""
    if not name.strip():
        return text
    try:
        content = read_policy_text(folder, name)
    except (OSError, ValueError):
        return name
    return hashlib.sha256(content.encode()).hexdigest()
