"""What every process of a test does: read its arguments, join the other processes, leave them."""

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
    """Join the group of all processes, each with one thread or its own GPU; yield this one's rank and their number.

    With gloo, the process exits at the end of the block, so its outputs must be in files by then. To destroy the group
    may deadlock: the destructor holds the GIL and waits for gloo's lock, while a gloo thread that frees a tensor holds
    gloo's lock and waits for the GIL (seen with torch 2.6).
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
        distributed.barrier()  # wait until no other process needs this one
        sys.stdout.flush()
        os._exit(0)
