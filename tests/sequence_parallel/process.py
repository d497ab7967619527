"""What every process of a test does: read its arguments, join the others, leave them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed


def arguments_of(description: str | None, **more: type) -> argparse.Namespace:
    """The command line: --device, --out, and required options by name and type."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name, kind in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    return parser.parse_args()


@contextmanager
def joined(device: str) -> Iterator[tuple[int, int]]:
    """The group of all processes, each with one thread or a GPU of its own: this one's rank, and how many they are.

    With gloo the process ends with the block, so what it gives stands in files by then. A group that is destroyed may
    wait forever: its destructor holds Python's lock and wants gloo's, while a thread of gloo that lets go of a tensor
    holds gloo's and wants Python's (seen with torch 2.6).
    """
    torch.set_num_threads(1)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = distributed.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    yield rank, distributed.get_world_size()
    if device == "cuda":
        distributed.destroy_process_group()
    else:
        distributed.barrier()  # no other process still wants something of this one
        sys.stdout.flush()
        os._exit(0)
