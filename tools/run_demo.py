"""Find or fetch a ComfyUI and run the demo in it; where neither can be had, run the demo in diffusers.

usage: python -m tools.run_demo --venv .venv --host-venv .venv-host
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .comfyui_folders import comfyui_folders
from .environment import interpreter

REPOSITORY = Path(__file__).resolve().parent.parent
RELEASE = "v0.33.0"
CLONE = REPOSITORY / "build" / f"ComfyUI-{RELEASE}"
SOURCE = "https://github.com/comfyanonymous/ComfyUI.git"
CLONE_SECONDS = 600


def cloned() -> Path | None:
    """The pinned release, cloned unless an earlier run did; None, after saying why, when it cannot be had."""
    if (CLONE / "main.py").is_file():
        return CLONE
    print(f"no ComfyUI on this machine: cloning {RELEASE} into {CLONE}", flush=True)
    shutil.rmtree(CLONE, ignore_errors=True)  # what an interrupted run may have left
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", RELEASE, SOURCE, str(CLONE)]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=environment, timeout=CLONE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"ComfyUI cannot be cloned ({error}).")
        return None
    return CLONE


def host_python(folders: list[Path], environment: Path) -> Path | None:
    """A Python with ComfyUI's requirements; None, after saying why, when they cannot be installed."""
    named = os.environ.get("COMFY_SAGE2_HOST_PYTHON")
    if named:
        return Path(named)
    command = [sys.executable, str(REPOSITORY / "tools" / "host_environment.py"), "--venv", str(environment)]
    try:
        subprocess.run([*command, "--comfyui", *map(str, folders)], check=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        print("ComfyUI's requirements cannot be installed (see above).")
        return None
    return interpreter(environment)


def host_options(environment: Path) -> list[str]:
    """The options of the demo that name its host."""
    folders = comfyui_folders()
    if not folders:
        clone = cloned()
        folders = [clone] if clone is not None else []
    python = host_python(folders, environment) if folders else None
    if python is None:
        print("*** The demo runs in its embedded host, diffusers, instead of ComfyUI. ***", flush=True)
        return []
    return ["--comfyui", str(folders[0]), "--comfyui-python", str(python)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="the project's environment")
    parser.add_argument("--host-venv", type=Path, required=True, help="ComfyUI's environment, made when it is missing")
    arguments = parser.parse_args()
    command = [str(interpreter(arguments.venv)), "-m", "lab", "demo", *host_options(arguments.host_venv)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
