"""Policies as files in a folder of ComfyUI's user folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..policy.document import LONGEST, from_text, to_text
from ..policy.policy import Policy

# A plain name: no separator, no drive, no leading dot, nothing that a shell or a file system reads as something else.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")
SUFFIX = ".json"


def policy_path(folder: Path, name: str) -> Path:
    """The file of the policy called `name` in `folder`; raises ValueError for anything but a plain name."""
    name = name.strip().removesuffix(SUFFIX)
    if not _NAME.fullmatch(name) or ".." in name or name.endswith((".", " ")):
        raise ValueError(
            "file must be a plain name of letters, digits, blanks, dots, hyphens and underscores, at most 100 long, "
            f"without a folder, got {name!r}"
        )
    path = folder / (name + SUFFIX)
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"file {name!r} is a link out of {folder}; replace it by the policy itself")
    return path


def save_policy(policy: Policy, folder: Path, name: str) -> Path:
    """Write `policy` as `name` in `folder`, over an earlier one of that name; the file appears all at once."""
    path = policy_path(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(to_text(policy), encoding="utf-8")
    unfinished.replace(path)
    return path


def read_policy_text(folder: Path, name: str) -> str:
    """The text of the policy file `name` in `folder`; ValueError when there is none, with the names that are there."""
    path = policy_path(folder, name)
    if not path.is_file():
        there = ", ".join(sorted(entry.stem for entry in folder.glob(f"*{SUFFIX}"))) if folder.is_dir() else ""
        raise ValueError(f"there is no policy {path.stem!r} in {folder}; there are: {there or 'none'}")
    if path.stat().st_size > 4 * LONGEST:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, too many for a policy")
    try:
        return path.read_text(encoding="utf-8-sig")  # an editor may have put a byte order mark before it
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): save it as UTF-8, or make the policy again") from error


def load_policy(folder: Path, text: str, name: str) -> Policy:
    """The policy in `text`, or in the file `name` of `folder`; exactly one of them must be given."""
    if bool(text.strip()) == bool(name.strip()):
        given = "both" if text.strip() else "neither"
        raise ValueError(f"give the policy either as text or as the name of a file, got {given}")
    return from_text(text if text.strip() else read_policy_text(folder, name))


def policies_folder() -> Path:
    """Where policies are kept, in ComfyUI's user folder."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / "comfy_sage2" / "policies"
