"""Arguments that several commands of the laboratory take, and that torch has to judge."""

from __future__ import annotations

import argparse

import torch

from comfy_sage2 import registry
from comfy_sage2.command_line import Parser
from comfy_sage2.options import AttentionOptions
from comfy_sage2.request import AttentionRequest


def usable_device(text: str) -> torch.device:
    """A type of argument: a device that torch can use here."""
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: this torch was built without CUDA
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"torch cannot use {text!r} here: {reason}") from None
    return device


def usual_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_kernel(name: str | None, option: str, device: torch.device, parser: Parser) -> None:
    """End with one line where the backend that `option` names cannot run on `device`."""
    if name is None:
        return
    reason = registry.explain(AttentionRequest.minimal(device, AttentionOptions()))[name]
    if reason is not None:
        parser.error(f"argument {option}: {name} cannot run here: {reason}")


def cuda_device(command: str) -> torch.device:
    """The current GPU. SystemExit with one line where torch finds none."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{command} needs a CUDA device, and torch finds none")
    return torch.device("cuda", torch.cuda.current_device())


def share(text: str) -> float:
    """A type of argument: a number above 0 and up to 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, got {text!r}")
    return number
