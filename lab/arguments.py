"""Arguments that several commands of the laboratory take."""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from comfy_sage2.command_line import Parser
from tools.comfyui.folders import comfyui_folder, comfyui_folders

Number = TypeVar("Number", int, float)


def parser_of(command: str, description: str | None, page: str) -> Parser:
    """The parser of a command that writes `page`, with its option --results."""
    parser = Parser(
        prog=f"python -m lab {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=folder, metavar="FOLDER", help=f"write {page} there")
    return parser


def folder(text: str) -> Path:
    """A type of argument: a folder for results, made before anything is measured."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the folder {text!r}: {error.strerror}") from None
    return Path(text)


def at_least_1(text: str) -> int:
    """A type of argument: a whole number, 1 or more."""
    return _number(text, int, lambda number: number >= 1, "a whole number of at least 1")


def above_0(text: str) -> float:
    """A type of argument: a finite number above 0."""
    return _number(text, float, lambda number: 0 < number < float("inf"), "a number above 0")


def _number(text: str, kind: Callable[[str], Number], fits: Callable[[Number], bool], expected: str) -> Number:
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not fits(number):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return number


def add_seed(parser: Parser) -> None:
    """Add the option --seed, for the order of turns. A fixed one would favor the same candidates in every run."""
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(32), help="for the order of turns (default: new in every run)"
    )


def device(text: str) -> torch.device:
    """A type of argument: a device that torch can use here."""
    try:
        chosen = torch.device(text)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch was built without CUDA
        raise argparse.ArgumentTypeError(f"torch cannot use {text!r} here: {str(error).splitlines()[0]}") from None
    return chosen


def shown(arguments: list[str]) -> list[str]:
    """A command's arguments as a page shows them: without where a build lies on this machine."""
    return [re.sub(r"^(--build=[^=]+|[^-][^=]*)=.*", r"\1=FOLDER", text) for text in arguments]


def add_device(parser: Parser) -> None:
    """Add the option --device; its default is a GPU if there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="default: cuda if there is one, else cpu")


def add_comfyui(parser: Parser) -> None:
    """Add the option --comfyui, for `chosen_comfyui`."""
    parser.add_argument("--comfyui", type=comfyui_folder, help="folder of ComfyUI (default: the first one found)")


def chosen_comfyui(parser: Parser, folder: Path | None) -> Path:
    """The ComfyUI that --comfyui names, or the first one in the usual folders; if there is none, end the command."""
    folders = [folder] if folder else comfyui_folders()
    if not folders:
        parser.error("there is no ComfyUI in the usual folders: name its folder with --comfyui")
    return folders[0].resolve()


def cuda_device(command: str) -> torch.device:
    """The current GPU. SystemExit with one line if torch finds none."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{command} needs a CUDA device, and torch finds none")
    return torch.device("cuda", torch.cuda.current_device())
