"""How one attention call scales over GPUs: Ulysses, ring attention and both, against the same call on one GPU.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m lab.bench.scaling --json scaling.json

"Call" is the wall-clock time from the start in all processes to the end in the slowest, the median over rounds in which
all divisions take turns. "Attention" is what a process computes in such a call, without the exchange. Needs yunchang.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from comfy_sage2.attention import attention
from comfy_sage2.integrations.yunchang import SequenceParallelAttention
from comfy_sage2.options import MODES
from comfy_sage2.shared_report import describe, without_folders, write

from . import shapes
from .shapes import Shape

_ROUNDS = 7
_ONE = "one GPU"

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Division:
    """Over how many processes heads and keys are divided."""

    ulysses: int
    ring: int

    def __str__(self) -> str:
        parts = [f"{name} {degree}" for name, degree in asdict(self).items() if degree > 1]
        return " x ".join(parts) or _ONE


@dataclass(frozen=True)
class ScalingRow:
    """One division: milliseconds, speed-up over one GPU, that / GPUs, and relative L1 distance to its output."""

    division: str
    call_ms: float
    attention_ms: float
    speedup: float
    efficiency: float
    distance: float


def divisions(processes: int, heads: int) -> list[Division]:
    """All ways to divide the call among the processes, those with the larger Ulysses degree first."""
    degrees = [degree for degree in range(processes, 0, -1) if processes % degree == 0 and heads % degree == 0]
    return [Division(degree, processes // degree) for degree in degrees]


def measure(shape: Shape, mode: str, backend: str | None, device: torch.device, rounds: int) -> list[ScalingRow]:
    """The rows of one mode: one GPU, then every division. Every process calls this and gets the same rows."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator(device).manual_seed(0)  # the same inputs in every process
    size = (shape.batch, shape.heads, shape.length, shape.head_dim)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(3))
    part = slice(rank * shape.length // processes, (rank + 1) * shape.length // processes)
    parts = [tensor[:, :, part].contiguous() for tensor in (q, k, v)]

    options: dict[str, Any] = {"mode": mode, "backend": backend}
    one = Division(1, 1)
    calls: dict[Division, Call] = {one: partial(_undivided, q, k, v, **options)}
    alone: dict[Division, Call] = {}
    for division in divisions(processes, shape.heads):
        parallel = SequenceParallelAttention(ulysses_degree=division.ulysses, ring_degree=division.ring, **options)
        calls[division] = partial(parallel, *parts)
        alone[division] = partial(_steps, division, q, k, v, **options)

    wanted = calls[one]()[:, :, part]
    distances = {division: _distance(call(), wanted) for division, call in calls.items() if division != one}
    call_times: dict[Division, list[float]] = {division: [] for division in calls}
    alone_times: dict[Division, list[float]] = {division: [] for division in alone}
    for run in alone.values():
        run()  # as the calls above: what a first call allocates and caches is not timed
    for _ in range(rounds):
        for times, subjects in ((call_times, calls), (alone_times, alone)):
            for division, run in subjects.items():
                times[division].append(_milliseconds(run, device))
    one_ms = median(call_times[one])
    rows = [ScalingRow(_ONE, one_ms, one_ms, 1.0, 1.0, 0.0)]
    for division, distance in distances.items():
        call_ms, attention_ms = median(call_times[division]), median(alone_times[division])
        speedup = one_ms / call_ms
        rows.append(ScalingRow(str(division), call_ms, attention_ms, speedup, speedup / processes, distance))
    return rows


def _undivided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mode: str, backend: str | None) -> torch.Tensor:
    return attention(q, k, v, mode=mode, backend=backend)


def _steps(
    division: Division, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mode: str, backend: str | None
) -> torch.Tensor:
    """The work of one process: some of the heads and, for a part of the queries, each part of the keys in turn."""
    heads, length = q.shape[1] // division.ulysses, q.shape[2] // division.ring
    q, k, v = (tensor[:, :heads, :length] for tensor in (q, k, v))
    for _ in range(division.ring):
        result = attention(q, k, v, mode=mode, backend=backend, return_lse=True)
    return result[0]


def _milliseconds(run: Call, device: torch.device) -> float:
    """The time of one call that all processes start together, in the slowest of them."""
    _synchronize(device)
    distributed.barrier()
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    return _of_all(1e3 * (time.perf_counter() - begin), device, distributed.ReduceOp.MAX)


def _distance(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L1 over the parts of all processes."""
    difference = _of_all(float((out.float() - wanted.float()).abs().sum()), device=out.device)
    return difference / _of_all(float(wanted.float().abs().sum()), device=out.device)


def _of_all(value: float, device: torch.device, op: Any = distributed.ReduceOp.SUM) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(tensor, op=op)
    return float(tensor)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: list[ScalingRow]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| | call, ms | attention, ms | speed-up | efficiency | distance |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.division} | {row.call_ms:.2f} | {row.attention_ms:.2f} | {row.speedup:.2f} | {row.efficiency:.0%} "
        f"| {row.distance:.1e} |"
        for row in rows
    ]
    return "\n".join(lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch.distributed.run … -m lab.bench.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="wan-14b-720p", help="a name from `bench --list` (default: %(default)s)")
    parser.add_argument("--length", type=int, help="another number of tokens; a multiple of the number of processes")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["8b"])
    parser.add_argument("--backend", help="a name from `explain` (default: the first accelerated one)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command out")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and let the first process print."""
    options = _parse(arguments)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it with python -m torch.distributed.run --standalone --nproc-per-node GPUS -m …")
    (shape,) = shapes.select([options.shape])
    if options.length is not None:
        shape = dataclasses.replace(shape, name=f"{shape.name} cut", length=options.length)
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return _run(options, shape, device)
    finally:
        distributed.destroy_process_group()


def _run(options: argparse.Namespace, shape: Shape, device: torch.device) -> int:
    processes, is_first = distributed.get_world_size(), distributed.get_rank() == 0
    if shape.is_causal or shape.length % processes:
        raise SystemExit(f"the shape must not be causal and its tokens divide by {processes}, got {shape}")
    document: dict[str, Any] = {
        "machine": describe(torch.cuda.current_device()) if device.type == "cuda" else {"gpu": "none"},
        "gpus": processes,
        "shape": asdict(shape),
        "rounds": options.rounds,
        "modes": {},
    }
    if is_first:
        print(f"{document['machine']['gpu']}, {processes} processes; {shape}", flush=True)
    for mode in options.modes:
        rows = measure(shape, mode, options.backend, device, options.rounds)
        document["modes"][mode] = [asdict(row) for row in rows]
        if is_first:
            print(f"\n{mode}\n\n{table(rows)}", flush=True)
    if is_first and options.json is not None:
        write(without_folders(document), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
