"""`python -m lab demo`: one caption in full precision and in each mode; with --baselines also with the paper's others.

Writes an mp4 for each, an animated comparison, a contact sheet, a table and what the attention did to the output
folder. Videos of an earlier run are used again as long as nothing changed that made them. The model is small: it shows
how close each comes to full precision, and says nothing about the speed of a real one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from comfy_sage2.command_line import Parser, output_folder
from tools.comfyui.folders import comfyui_folder, reason_too_old_for_demo


def parse(arguments: list[str]) -> argparse.Namespace:
    """The demo's options; SystemExit with status 2, after one line, for wrong ones."""
    parser = Parser(prog="python -m lab demo", description=__doc__)
    parser.add_argument(
        "--output",
        type=output_folder,
        default="demo-output",  # as text, so that it is checked too
        help="folder for the results (default: %(default)s)",
    )
    parser.add_argument(
        "--baselines", action="store_true", help="also sample with the attentions that the paper compares with"
    )
    parser.add_argument("--again", action="store_true", help="sample anew what an earlier run finished")
    parser.add_argument("--comfyui", type=comfyui_folder, help="folder of a ComfyUI; without it, diffusers is the host")
    parser.add_argument(
        "--comfyui-python", type=_python, default=Path(sys.executable), help="Python with its requirements"
    )
    options = parser.parse_args(arguments)
    if options.comfyui is not None and (reason := reason_too_old_for_demo(options.comfyui)) is not None:
        parser.error(f"argument --comfyui: {reason}")
    return options


def _python(text: str) -> Path:
    """A type of argument: a Python that starts."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"expected a Python, and there is no file {text}")
    try:
        said = subprocess.run([path.absolute(), "-c", "print('Python')"], capture_output=True, check=False).stdout
    except OSError as error:
        raise argparse.ArgumentTypeError(f"expected a Python, and {text} does not start: {error.strerror}") from None
    if said.strip() != b"Python":
        raise argparse.ArgumentTypeError(f"expected a Python, and {text} is none")
    return path


if __name__ == "__main__":  # for whoever prepares a run, and needs to know before
    parse(sys.argv[1:])
