"""`make comfyui-tests`: make the environment that starts ComfyUI, then run the tests.

    python -m tools.comfyui.suite --venv .venv --host-venv .venv-host [--packs FOLDER] [--clone]

Where that environment cannot be made, or no ComfyUI be had with `--clone`, the suite is told as NOT TESTED, with exit
status 0, unless COMFYUI_PATH asks for a ComfyUI by name. Otherwise the exit status is pytest's.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .. import suite
from ..environment import interpreter
from ..fetching import Unavailable
from .clone import cloned
from .environment import make_environment
from .folders import comfyui_folders, packs_folder

HOST_PYTHON = "COMFY_SAGE2_HOST_PYTHON"  # names a Python that has ComfyUI's requirements


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="the project's environment")
    parser.add_argument("--host-venv", type=Path, required=True, help="ComfyUI's environment, made when it is missing")
    parser.add_argument(
        "--packs", type=packs_folder, metavar="FOLDER", help="clones of node packs that it must serve too"
    )
    parser.add_argument("--clone", action="store_true", help="clone a ComfyUI where there is none")
    options = parser.parse_args()
    folders = comfyui_folders()
    if not folders and options.clone:
        try:
            folders = [cloned()]
        except Unavailable as error:
            reason = f"no ComfyUI here, and it cannot be cloned ({error}): name one that you have in COMFYUI_PATH"
            return suite.not_tested("comfyui", reason)
    if folders and not os.environ.get(HOST_PYTHON):
        try:
            make_environment(options.host_venv, folders, options.packs)
        except Unavailable as error:
            if os.environ.get("COMFYUI_PATH"):
                raise
            return suite.not_tested("comfyui", f"ComfyUI's requirements cannot be installed: {error}")
    return suite.run("comfyui", interpreter(options.venv), "tests/comfyui")


if __name__ == "__main__":
    sys.exit(main())
