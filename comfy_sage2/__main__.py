"""`python -m comfy_sage2 <command>`, or `python <path of this folder> <command>`.

The second form is for a Python that ignores the current folder, such as that of ComfyUI's Windows portable.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

if not __package__:
    # Run by path, Python puts this folder first on sys.path, where its modules would hide others of the same names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from comfy_sage2.command_line import run

COMMANDS = {
    "doctor": ("comfy_sage2.doctor", "say which attention backends can run on this machine, and why others cannot"),
}


def _import(module: str) -> ModuleType:
    """Import the module of the only command."""
    from comfy_sage2 import doctor

    return doctor


def main(arguments: list[str]) -> int:
    return run("comfy_sage2", COMMANDS, arguments, _import)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
