"""Runs commands, and prints their output to consoles that cannot show every character, or that are closed."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NoReturn

INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended, as shells have it


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong argument with one line, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")


def run(
    program: str,
    commands: Mapping[str, tuple[str, str]],
    arguments: list[str],
    load: Callable[[str], ModuleType],
    python: str = "ComfyUI's own Python",
) -> int:
    """Run the command that `arguments` name; return its exit status.

    commands: name -> (module with `main(arguments)`, description). load: imports a module by its name. python: which
    one has what the commands need.
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
    # Import only the chosen command: the doctor has to work where the requirements of the others are missing.
    try:
        module = load(commands[chosen][0])
    except (ImportError, OSError) as error:  # OSError: a torch on Windows whose own libraries cannot be loaded
        missing = error.name if isinstance(error, ImportError) else None
        if missing is not None and missing.partition(".")[0] in ("comfy_sage2", "lab", "tools"):
            raise
        if missing is not None and isinstance(error, ModuleNotFoundError):
            text = f"{chosen} needs {missing}, which {sys.executable} does not have; run it with {python}"
        else:
            text = f"{chosen} cannot start: something in {sys.executable} is broken: {type(error).__name__}: {error}"
        print(text, file=sys.stderr)
        return 1
    try:
        status: int = module.main(arguments[1:])
    except KeyboardInterrupt:
        print(f"{chosen}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def print_any_letters() -> None:
    """Escape characters that the console's encoding lacks, such as in a Windows folder's name, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print `text`; a closed pipe or a full disk does not change the command's exit status."""
    try:
        print(text, flush=True)
    except OSError:
        # At exit Python would flush the rest again, and fail.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
