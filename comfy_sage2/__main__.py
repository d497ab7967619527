"""`python -m comfy_sage2 <command>`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

# Command -> the module whose `main(arguments)` runs it, and what it does. A part that is not installed is not offered.
COMMANDS = {
    "doctor": ("comfy_sage2.doctor", "say which attention backends can run on this machine, and why others cannot"),
    "demo": ("comfy_sage2.demo.run", "sample one video in full precision, 8b and 4b, and compare them"),
    "bench": ("comfy_sage2.benchmark.run", "measure the speed of the kernels on this machine"),
    "eval": ("comfy_sage2.evaluation.run", "measure how close quantised attention is to full precision"),
}


def _is_installed(module: str) -> bool:
    package = module.rpartition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    commands = {name: entry for name, entry in COMMANDS.items() if _is_installed(entry[0])}
    listed = "\n".join(f"  {name:<8} {text}" for name, (_, text) in commands.items())
    parser = argparse.ArgumentParser(
        prog="python -m comfy_sage2",
        description=f"commands:\n{listed}",
        epilog="`python -m comfy_sage2 COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=commands, metavar="COMMAND")
    chosen = parser.parse_args(arguments[:1]).command
    # Imported only when asked for: the doctor has to work where the requirements of the others are missing.
    try:
        module = importlib.import_module(commands[chosen][0])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("comfy_sage2"):
            raise
        print(
            f"{chosen} needs {error.name}, which {sys.executable} does not have; run it with ComfyUI's own Python",
            file=sys.stderr,
        )
        return 1
    return module.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
