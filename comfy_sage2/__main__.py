"""`python -m comfy_sage2 <command>`."""

from __future__ import annotations

import sys

from .command_line import run

COMMANDS = {
    "doctor": ("comfy_sage2.doctor", "say which attention backends can run on this machine, and why others cannot"),
    "bench": ("comfy_sage2.benchmark.run", "measure the speed of the kernels on this machine"),
}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    return run("comfy_sage2", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
