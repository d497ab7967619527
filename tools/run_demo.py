"""Find or fetch a ComfyUI and run the demo in it; where neither can be had, run the demo in diffusers.

    python -m tools.run_demo --venv .venv --host-venv .venv-host

Further arguments go to `python -m lab demo`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from comfy_sage2.command_line import Parser, output_folder

from .comfyui.environment import make_environment
from .comfyui.folders import comfyui_folders, reason_too_old_for_demo
from .environment import interpreter
from .progress import Activity, run_showing

REPOSITORY = Path(__file__).resolve().parent.parent
RELEASE = "v0.33.0"
CLONE = REPOSITORY / "build" / f"ComfyUI-{RELEASE}"
SOURCE = "https://github.com/comfyanonymous/ComfyUI.git"


def cloned() -> Path | None:
    """The pinned release, cloned unless an earlier run did; None, after saying why, when it cannot be had."""
    if (CLONE / "main.py").is_file():
        return CLONE
    shutil.rmtree(CLONE, ignore_errors=True)  # what an interrupted run may have left
    command = ["git", "clone", "--progress", "--depth", "1", "--branch", RELEASE, SOURCE, str(CLONE)]
    # Neither a question for a password nor a connection that stands still may hold the demo up.
    environment = {
        **os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_HTTP_LOW_SPEED_LIMIT": "1000", "GIT_HTTP_LOW_SPEED_TIME": "30",
    }  # fmt: skip
    try:
        with Activity(f"cloning ComfyUI {RELEASE}") as activity:
            status, lines = run_showing(command, activity, environment)
            reason = lines[-1].strip() if lines else f"exit status {status}"
            if status != 0:
                raise OSError(reason)
    except OSError as error:
        print(f"No ComfyUI here, and it cannot be cloned ({error}). Have one? make demo COMFYUI_PATH=/path/to/ComfyUI")
        return None
    return CLONE


def host_python(folders: list[Path], environment: Path) -> Path | None:
    """A Python with ComfyUI's requirements; None, after saying why, when they cannot be installed."""
    named = os.environ.get("COMFY_SAGE2_HOST_PYTHON")
    if named:
        return Path(named)
    try:
        return make_environment(environment, folders).python
    except SystemExit as error:
        print(f"ComfyUI's requirements cannot be installed: {error}")
        return None


def host_options(environment: Path) -> list[str]:
    """The options of the demo that name its host."""
    folders = comfyui_folders()
    usable = [folder for folder in folders if reason_too_old_for_demo(folder) is None]
    if not usable and (clone := cloned()) is not None:
        usable = folders = [clone]
    python = host_python(folders, environment) if usable else None
    if python is None:
        print("The demo runs in its embedded host, diffusers, instead of ComfyUI.", flush=True)
        return []
    return ["--comfyui", str(usable[0]), "--comfyui-python", str(python)]


def _environment(text: str) -> Path:
    """A type of argument: an environment that is there."""
    if not interpreter(Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"expected an environment, and there is no {interpreter(Path(text))}")
    return Path(text)


def main() -> int:
    """The command."""
    parser = Parser(
        prog="python -m tools.run_demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=_environment, required=True, help="the project's environment")
    parser.add_argument(
        "--host-venv", type=output_folder, required=True, help="ComfyUI's environment, made when it is missing"
    )
    options, more = parser.parse_known_args()
    python = str(interpreter(options.venv))
    # Wrong ones are refused before anything is cloned or installed for them.
    status = subprocess.run([python, "-m", "lab.demo.arguments", *more], check=False).returncode
    if status != 0:
        return status
    command = [python, "-m", "lab", "demo", *host_options(options.host_venv), *more]
    print("starting the demo", flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
