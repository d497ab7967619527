"""A command line of named commands, each in a module of its own that is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping


def run(program: str, commands: Mapping[str, tuple[str, str]], arguments: list[str]) -> int:
    """Run one of `commands` and return its exit status.

    commands: name -> (the module whose `main(arguments)` runs it, what it does).
    """
    listed = "\n".join(f"  {name:<8} {text}" for name, (_, text) in commands.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=f"commands:\n{listed}",
        epilog=f"`python -m {program} COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=commands, metavar="COMMAND")
    chosen = parser.parse_args(arguments[:1]).command
    # Imported only when asked for: the doctor has to work where the requirements of the others are missing.
    try:
        module = importlib.import_module(commands[chosen][0])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("comfy_sage2", "lab"):
            raise
        print(
            f"{chosen} needs {error.name}, which {sys.executable} does not have; run it with ComfyUI's own Python",
            file=sys.stderr,
        )
        return 1
    return module.main(arguments[1:])
