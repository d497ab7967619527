"""A command line of named commands, each in a module of its own that is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from .console import print_any_letters


class Named(Protocol):
    """What a command can be asked for by a part of its name."""

    @property
    def name(self) -> str:
        """In words."""


N = TypeVar("N", bound=Named)
Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong argument with one line, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print what was wrong, and end."""
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")

    def with_part(self, part: str, kind: str, known: Sequence[N]) -> list[N]:
        """Those of `known` with `part` in their names, in upper or lower case; an error that lists all without any."""
        found = [one for one in known if part.lower() in one.name.lower()]
        if not found:
            self.error(f"no {kind} has {part!r} in its name: {', '.join(one.name for one in known)}")
        return found


def at_least_1(text: str) -> int:
    """A type of argument: a whole number, 1 or more."""
    return _number(text, int, lambda number: number >= 1, "a whole number of at least 1")


def above_0(text: str) -> float:
    """A type of argument: a finite number above 0."""
    return _number(text, float, lambda number: 0 < number < float("inf"), "a number above 0")


def seed_number(text: str) -> int:
    """A type of argument: a seed that every generator of random numbers takes."""
    return _number(text, int, lambda number: 0 <= number < 1 << 32, f"a whole number from 0 to {(1 << 32) - 1}")


def _number(text: str, kind: Callable[[str], Number], will_do: Callable[[Number], bool], wanted: str) -> Number:
    with suppress(ValueError):
        number = kind(text)
        if will_do(number):
            return number
    raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")


def given_or_new_seed(given: int | None) -> int:
    """`given`, or else a seed that is drawn anew: with one and the same, an order of turns favors the same candidates
    in every run.
    """
    return secrets.randbits(32) if given is None else given


def output_folder(text: str) -> Path:
    """A type of argument: a folder for results, which need not exist yet."""
    path = Path(text)
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''; the current folder is '.'")
    with _refusing(text):
        there = next(part for part in (path, *path.absolute().parents) if part.exists())
        if not there.is_dir():  # also below a file no folder can be made
            raise argparse.ArgumentTypeError(f"expected a folder, and a file is in the way of {text!r}")
        _try_to_make_in(there)
    return path


def output_file(text: str) -> Path:
    """A type of argument: a file to write, in a folder that exists."""
    path = Path(text)
    with _refusing(text):
        if path.is_dir() or not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
        if not path.exists():
            _try_to_make_in(path.parent)
        elif path.is_file():  # opening a pipe may wait for its reader
            path.open("ab").close()
    return path


def _try_to_make_in(folder: Path) -> None:
    """OSError when nothing can be made in `folder`; rights alone do not tell, as for root in /proc."""
    trial = folder / f".comfy_sage2-{secrets.token_hex(8)}"
    try:
        trial.mkdir()
        trial.rmdir()
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, str(folder)) from error
    except OSError as error:
        raise OSError(error.errno, f"nothing can be made in {folder} ({error.strerror})") from error


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """A path that the system does not take or let be written is refused as an argument."""
    try:
        yield
    except PermissionError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: no permission to write to {error.filename}") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None


def existing_file(text: str) -> Path:
    """A type of argument: a file to read."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"expected a file, and there is none at {text!r}")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"no permission to read {text!r}")
    return path


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
