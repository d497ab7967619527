"""Commands: their arguments, and printing where the console cannot show every letter, or nothing at all."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong argument with one line, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def run(
    program: str,
    commands: Mapping[str, tuple[str, str]],
    arguments: list[str],
    load: Callable[[str], ModuleType],
) -> int:
    """Run one of `commands`, name -> (module with `main(arguments)`, words), which `load` imports; its status."""
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
        module = load(commands[chosen][0])
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


def print_any_letters() -> None:
    """Escape what the console's encoding lacks, such as letters of a folder on Windows, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print `text` where somebody listens: a closed pipe or a full disk does not change what a command answers."""
    try:
        print(text, flush=True)
    except OSError:
        # Python writes the rest once more when it ends, and would end with an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
