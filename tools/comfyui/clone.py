"""A ComfyUI for a machine that has none: a pinned release, cloned into build/."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..fetching import Unavailable, seconds_left
from ..progress import Activity, run_showing
from .folders import CLONE, RELEASE

SOURCE = "https://github.com/comfyanonymous/ComfyUI.git"


def cloned() -> Path:
    """The folder of the pinned release, cloned unless an earlier run did. Unavailable, with the reason, else."""
    if (CLONE / "main.py").is_file():
        return CLONE
    shutil.rmtree(CLONE, ignore_errors=True)  # what an interrupted run may have left
    command = ["git", "clone", "--progress", "--depth", "1", "--branch", RELEASE, SOURCE, str(CLONE)]
    # Neither a question for a password nor a connection that stands still may hold a command up.
    environment = {
        **os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_HTTP_LOW_SPEED_LIMIT": "1000", "GIT_HTTP_LOW_SPEED_TIME": "30",
    }  # fmt: skip
    try:
        with Activity(f"cloning ComfyUI {RELEASE}") as activity:
            status, lines = run_showing(command, activity, environment, seconds_left())
            if status != 0:
                raise Unavailable(lines[-1].strip() if lines else f"git ends with exit status {status}")
    except OSError as error:  # no git, or no time left
        raise Unavailable(str(error)) from error
    return CLONE
