"""`python -m lab <command>`."""

from __future__ import annotations

import sys

from comfy_sage2.command_line import run

COMMANDS = {
    "demo": ("lab.demo.run", "sample one video in full precision, 8b and 4b, and compare them"),
    "bench": ("lab.bench.run", "measure the speed of the kernels on this machine"),
    "eval": ("lab.evaluation.run", "measure how close quantized attention is to full precision"),
    "steps": ("lab.measurements.sampling_steps", "measure seconds a sampling step of Wan 2.1 in ComfyUI"),
    "families": ("lab.measurements.families.run", "say what the node serves and saves in each model family"),
    "exactness": (
        "lab.measurements.exactness",
        "show what rotation, masked keys and the order of sums do to the error",
    ),
    "sparse": ("lab.measurements.sparse", "sample whole videos with sparse attention, by bounds and by shares"),
    "sparse-calls": (
        "lab.measurements.sparse_calls",
        "compare one sparse call at Wan 14B's shape with comfy-kitchen's Sol-Attn",
    ),
    "lists": ("lab.measurements.list_times", "measure how much faster calls with block masks are than dense ones"),
    "mma-family": (
        "lab.measurements.mma_family",
        "compare builds of the kernels with each other and with peers, on a Hopper GPU",
    ),
    "choices": ("lab.measurements.choices", "compare what the node chooses by its measurement with what is fastest"),
}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    return run("lab", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
