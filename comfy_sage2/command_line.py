"""The command line of `python -m comfy_sage2`, and of the laboratory's and the tools' commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from typing import NoReturn

from .system.console import print_any_letters


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong argument with one line, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print what was wrong, and end."""
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def run(program: str, commands: Mapping[str, tuple[str, str]], arguments: list[str]) -> int:
    """Run one of `commands` and return its exit status.

    commands: name -> (the module whose `main(arguments)` runs it, what it does).
    """
    print_any_letters()
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}} {text}" for name, (_, text) in commands.items())
    parser = Parser(
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
    except (ImportError, OSError) as error:  # OSError: a torch on Windows whose own libraries cannot be loaded
        lacking = error.name if isinstance(error, ImportError) else None
        if lacking is not None and lacking.partition(".")[0] in ("comfy_sage2", "lab", "tools"):
            raise
        if lacking is not None and isinstance(error, ModuleNotFoundError):
            text = f"{chosen} needs {lacking}, which {sys.executable} does not have; run it with ComfyUI's own Python"
        else:
            text = f"{chosen} cannot start, something in {sys.executable} is broken: {type(error).__name__}: {error}"
        print(text, file=sys.stderr)
        return 1
    status: int = module.main(arguments[1:])
    return status
