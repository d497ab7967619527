"""What every process of a test does: read its arguments, join the others, leave them."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

    A caller keeps nothing that refers to a group beyond the block: gloo's threads end with the group's last reference,
    and one that lets go of a tensor while Python ends aborts the process.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = distributed.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    yield rank, distributed.get_world_size()
    distributed.destroy_process_group()
    if "yunchang.globals" in sys.modules:
        sys.modules["yunchang.globals"].PROCESS_GROUP.__init__()  # it refers to the groups that were set last
    gc.collect()  # modules of a model are in cycles
    left = gloo_threads()
    assert not left, f"something still refers to a process group: {left}"


def gloo_threads() -> list[str]:
    """The names of this process's threads that are gloo's; none on a system without /proc."""
    names = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            names.append((thread / "comm").read_text(encoding="utf-8").strip())
    return [name for name in names if "gloo" in name]
