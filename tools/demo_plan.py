"""What `make demo` is going to do, said before anything is downloaded: how long it takes and how much disk it needs.

python -m tools.demo_plan --venv .venv --host-venv .venv-host
"""

from __future__ import annotations

from pathlib import Path

from comfy_sage2.command_line import Parser

from .comfyui.folders import CLONE, RELEASE, comfyui_folders
from .environment import interpreter


def plan(venv: Path, host_venv: Path) -> list[str]:
    """The lines. venv, host_venv: the project's environment and ComfyUI's, each there or not."""
    downloads = []
    if not interpreter(venv).is_file():
        downloads.append(f"PyTorch and other packages into {venv}: 1.5 GB on disk without CUDA, several GB with it")
    if not comfyui_folders() and not CLONE.is_dir():
        downloads.append(f"ComfyUI {RELEASE}; a ComfyUI that you have is used with make demo COMFYUI_PATH=/path/to/it")
    if not interpreter(host_venv).is_file():
        downloads.append(f"ComfyUI's packages into {host_venv}: about as much again")
    return [
        "make demo samples one short video with a small model in full precision, precise, 8b and 4b.",
        *(f"  downloads, once: {what}" for what in downloads),
        "  time after the downloads: about 4 minutes on two free CPU cores, less on a GPU; a second run takes seconds",
        "  results: 30 MB in demo-output/",
    ]


def main() -> None:
    """The command."""
    parser = Parser(prog="python -m tools.demo_plan", description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="the project's environment")
    parser.add_argument("--host-venv", type=Path, required=True, help="ComfyUI's environment")
    options = parser.parse_args()
    print("\n".join(plan(options.venv, options.host_venv)), flush=True)


if __name__ == "__main__":
    main()
