"""`python -m lab <command>`."""

from __future__ import annotations

import importlib
import sys

from comfy_sage2.command_line import run

COMMANDS = {
    "demo": ("lab.demo.run", "sample one video in full precision, precise, 8b and 4b, and compare them"),
    "bench": (
        "lab.bench.run",
        "single calls beside other attentions: speed, accuracy, memory; builds of the kernels",
    ),
    "families": ("lab.families.run", "what the node serves in each model family, and seconds per sampling step"),
    "videos": ("lab.evaluation.videos", "whole videos with every attention, beside full precision"),
    "accuracy": ("lab.evaluation.accuracy", "the paper's accuracy tables"),
    "sparse": ("lab.measurements.sparse", "one sparse call beside comfy-kitchen's Sol-Attn"),
    "sparse-rows": ("lab.measurements.sparse_rows", "errors of heads with sparse attention over all rows"),
    "memory": (
        "lab.measurements.memory",
        "memory that attention takes: calls, MiniMax H3's blocks, the longest clip",
    ),
    "choices": ("lab.measurements.choices", "the node's measured choices, compared with the fastest attentions"),
}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    # ComfyUI's own lacks diffusers.
    return run("lab", COMMANDS, arguments, importlib.import_module, python="a Python that has it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
