"""`python -m comfy_sage2 bench`: speed, memory and accuracy of the kernels beside the other attentions on this machine.

Speed is 4 B H Nq Nkv D operations (half of that when causal) / time, for the attention kernels alone and for the whole
call with its quantisation. All candidates run in this one process and take turns; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .. import registry
from ..command_line import Parser, above_0, output_file
from ..options import MODES
from . import accuracy, machine, ours, peers, plot, record, shapes, speed, tables
from .candidates import Candidate, Found
from .kernel_times import KernelTimer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ALL_SHAPES = ("paper", "video")
_SECONDS, _QUICK_SECONDS = 150.0, 25.0


def _parse(arguments: list[str]) -> argparse.Namespace:
    accelerated = [backend.name for backend in registry.backends() if backend.accelerated]
    parser = Parser(
        prog="python -m comfy_sage2 bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME",
        help="names of shapes, or the groups paper, video, quick (default: the first two)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"the group quick in about {_QUICK_SECONDS:.0f} seconds")
    parser.add_argument("--list", action="store_true", help="list shapes and candidates, measure nothing")
    parser.add_argument(
        "--backends", nargs="+", choices=accelerated, help="only these kernels (default: all that run here)"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--peers", nargs="*", choices=list(peers.PEERS), default=list(peers.PEERS), help="only these others"
    )
    parser.add_argument(
        "--dtype", choices=list(_DTYPES), default="bf16", help="of q, k, v and the output (default: bf16)"
    )
    parser.add_argument("--seconds", type=above_0, help=f"time for the speeds, about (default: {_SECONDS:.0f})")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw the speeds (.png, .svg, .pdf); needs matplotlib"
    )
    parser.add_argument(
        "--share", action="store_true",
        help="write the result to comfy-sage2-bench-GPU.json, to be sent to us: GPU, driver, versions, kernel hashes "
        "and figures, and nothing about you or your files",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        options.shapes = shapes.select(options.shapes or (("quick",) if options.quick else _ALL_SHAPES))
    except ValueError as error:
        parser.error(f"argument --shapes: {error}")
    return options


def _picture(text: str) -> Path:
    path = output_file(text)
    if path.suffix not in plot.ENDINGS:
        raise argparse.ArgumentTypeError(f"expected a file that ends in {plot.ENDINGS_IN_WORDS}, got {text!r}")
    return path


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def main(arguments: list[str]) -> int:
    """Measure and print; 0 when something was measured, 1 when that is not possible here."""
    options = _parse(arguments)
    if options.plot is not None and (problem := plot.reason_unavailable()) is not None:
        return _fail(problem)
    if not torch.cuda.is_available():
        return _fail(
            "bench needs a CUDA device, and this torch sees none. `python -m comfy_sage2 doctor` says what it sees."
        )
    dtype = _DTYPES[options.dtype]
    found = _find(options, dtype)
    if options.list:
        _print_list(options.shapes, found)
        return 0
    if not found.candidates:
        return _fail("\n".join(f"{name}: {reason}" for name, reason in found.missing.items()))
    seconds = options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)
    document = _measure(options.shapes, found, dtype, seconds)
    return _write(document, options)


def _find(options: argparse.Namespace, dtype: torch.dtype) -> Found:
    """Ours first, then the peers."""
    own = ours.find(options.backends, options.modes, dtype)
    others = peers.find(options.peers)
    return Found(own.candidates + others.candidates, own.missing | others.missing)


def _print_list(chosen: tuple[shapes.Shape, ...], found: Found) -> None:
    for shape in chosen:
        print(shape)
    for candidate in found.candidates:
        print(f"{candidate.name} ({candidate.version}){': ' if candidate.note else ''}{candidate.note}")
    _print_missing(found)


def _print_missing(found: Found) -> None:
    for name, reason in found.missing.items():
        print(f"not measured: {name}: {reason}")


def _measure(chosen: tuple[shapes.Shape, ...], found: Found, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    about = machine.describe()
    driver = about["driver"].get("driver_version", "unknown")
    print(f"{about['gpu']}, driver {driver}, torch {about['torch']}, {str(dtype).removeprefix('torch.')}")
    _print_missing(found)
    print(f"\naccuracy against float64, {accuracy.SHAPE}")
    accuracies, accuracy_failures = accuracy.measure(found.candidates, dtype)
    print("\n".join(tables.accuracy_lines(accuracies, accuracy_failures)), flush=True)

    measured: list[Candidate] = [candidate for candidate in found.candidates if candidate.is_measured]
    notes = {candidate.name: candidate.note for candidate in measured}
    kernel_timer = KernelTimer()
    results = []
    for shape, share in speed.shares(chosen, seconds, time.monotonic):
        results.append(_measure_shape(shape, measured, dtype, share, kernel_timer))
        print("", *tables.speed_lines(results[-1], notes), sep="\n", flush=True)
    if kernel_timer.problem is not None:
        print(f"\nno kernel times: {kernel_timer.problem}")
    return record.build(
        machine=about,
        settings={"dtype": str(dtype).removeprefix("torch."), "seconds": seconds},
        candidates=found.candidates,
        missing=found.missing,
        accuracies=accuracies,
        accuracy_failures=accuracy_failures,
        results=results,
        kernel_problem=kernel_timer.problem,
    )


def _measure_shape(
    shape: shapes.Shape, candidates: list[Candidate], dtype: torch.dtype, seconds: float, kernel_timer: KernelTimer
) -> speed.ShapeResult:
    """As `speed.measure`; a shape that cannot be measured is a result, too, so that the others are not lost."""
    try:
        return speed.measure(shape, candidates, dtype, seconds, kernel_timer)
    except RuntimeError as error:  # no memory for the inputs, or a peer's kernel has broken CUDA for this process
        return speed.ShapeResult(shape, [], {"all candidates": f"{type(error).__name__}: {error}"})


def _write(document: dict[str, Any], options: argparse.Namespace) -> int:
    try:
        if options.json is not None:
            record.write(document, options.json)
        if options.plot is not None:
            plot.draw(document, options.plot)
        if options.share:
            path = Path(record.share_name(document["machine"]))
            record.write(document, path)
            print(f"\nwrote {path.resolve()}: look at it, then attach it to an issue of the project")
    except OSError as error:
        return _fail(f"the result cannot be written: {error}")
    return 0 if document["speed"] else _fail("nothing could be measured: the reasons stand above")
