"""Find or fetch a ComfyUI and run the demo in it; where neither can be had, run the demo in diffusers.

    python -m tools.run_demo --venv .venv --host-venv .venv-host

Further arguments go to `python -m lab demo`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from comfy_sage2.command_line import Parser, output_folder

from .comfyui.clone import cloned
from .comfyui.environment import make_environment
from .comfyui.folders import comfyui_folders, reason_too_old_for_demo
from .environment import interpreter
from .fetching import Unavailable


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
    if not usable:
        try:
            usable = folders = [cloned()]
        except Unavailable as error:
            print(
                f"No ComfyUI here, and it cannot be cloned ({error}). Have one? make demo COMFYUI_PATH=/path/to/ComfyUI"
            )
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
