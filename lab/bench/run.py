"""`python -m lab bench`: speed, memory and accuracy of the kernels beside the other attentions on this machine.

Speed is 4 B H Nq Nkv D operations (half of that when causal) / time, for the attention kernels alone and for the whole
call with its quantization. All candidates run in this one process and take turns, in an order that is drawn anew in
every round; figures are medians over rounds, spread is (most - least) / median. Then each runs alone for a while.
Interrupted, it writes what it has measured.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from comfy_sage2 import registry
from comfy_sage2.command_line import Parser, above_0, given_or_new_seed, output_file, output_folder, seed_number
from comfy_sage2.options import MODES

from . import accuracy, gpu, ours, peers, record, settle, shapes, speed, sustained, tables
from .candidates import BenchmarkCandidate, FoundCandidates
from .kernel_times import KernelTimer

_ALL_SHAPES = ("paper", "video", "calls")
_SECONDS, _QUICK_SECONDS = 270.0, 25.0
_HEAT_SECONDS, _QUICK_HEAT_SECONDS = 30.0, 5.0
_SUSTAINED = ("wan-1.3b-480p", "wan-14b-720p", "d64-n8192")
_NONE = "none"


def _parse(arguments: list[str]) -> argparse.Namespace:
    accelerated = [backend.name for backend in registry.kernels()]
    parser = Parser(
        prog="python -m lab bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME",
        help="names of shapes, or the groups paper, video, calls, quick (default: the first three)",
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
        "--sustained",
        nargs="*",
        metavar="NAME",
        help="shapes on which each runs alone for 2 seconds, or none "
        f"(default: {', '.join(_SUSTAINED)}; --quick: none)",
    )
    parser.add_argument("--seconds", type=above_0, help=f"time for the speeds, about (default: {_SECONDS:.0f})")
    parser.add_argument("--seed", type=seed_number, help="of the order of turns (default: another one in every run)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--results", type=output_folder, metavar="FOLDER",
        help="write the result to attention-GPU.md and .json in this folder, as docs/results/ has them",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        options.shapes = shapes.select(options.shapes or (("quick",) if options.quick else _ALL_SHAPES))
    except ValueError as error:
        parser.error(f"argument --shapes: {error}")
    try:
        options.sustained = shapes.select(_sustained_names(options))
    except ValueError as error:
        parser.error(f"argument --sustained: {error}")
    return options


def _sustained_names(options: argparse.Namespace) -> Sequence[str]:
    if options.sustained:
        named: list[str] = options.sustained
        return () if named == [_NONE] else named
    chosen = {shape.name for shape in options.shapes}
    return () if options.quick and options.sustained is None else [name for name in _SUSTAINED if name in chosen]


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def main(arguments: list[str]) -> int:
    """Measure and print; 0 when something was measured, 1 when that is not possible here."""
    options = _parse(arguments)
    if not torch.cuda.is_available():
        return _fail(
            "bench needs a CUDA device, and this torch sees none. `python -m comfy_sage2 doctor` says what it sees."
        )
    found = _find(options)
    if options.list:
        _print_list(options.shapes, found)
        return 0
    if not found.candidates:
        return _fail("\n".join(f"{name}: {reason}" for name, reason in found.missing.items()))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends it as Ctrl-C does
    try:
        document = _measure(options, found)
    finally:
        signal.signal(signal.SIGTERM, before)
    return _write(document, options, arguments)


def _find(options: argparse.Namespace) -> FoundCandidates:
    """Ours first, then the peers."""
    own = ours.find(options.backends, options.modes)
    others = peers.find(options.peers)
    return FoundCandidates(own.candidates + others.candidates, own.missing | others.missing)


def _print_list(chosen: tuple[shapes.Shape, ...], found: FoundCandidates) -> None:
    for shape in chosen:
        print(shape)
    for candidate in found.candidates:
        print(f"{candidate.name} ({candidate.version}){': ' if candidate.note else ''}{candidate.note}")
    _print_missing(found)


def _print_missing(found: FoundCandidates) -> None:
    for name, reason in found.missing.items():
        print(f"not measured: {name}: {reason}")


def _measure(options: argparse.Namespace, found: FoundCandidates) -> dict[str, Any]:
    about = gpu.describe(torch.cuda.current_device())
    driver = about["driver"].get("driver_version", "unknown")
    print(f"{about['gpu']}, driver {driver}, torch {about['torch']}")
    _print_missing(found)
    print(f"\naccuracy against float64, {accuracy.SHAPE}")
    accuracies, accuracy_failures = accuracy.measure(found.candidates)
    print("\n".join(tables.accuracy_lines(accuracies, accuracy_failures)), flush=True)

    seed = given_or_new_seed(options.seed)
    rng = random.Random(seed)
    seconds = options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)
    heat_seconds = _QUICK_HEAT_SECONDS if options.quick else _HEAT_SECONDS
    print(f"\nheating the GPU for {heat_seconds:.0f} s; order of turns by seed {seed}", flush=True)
    settle.heat(heat_seconds)
    measured = [candidate for candidate in found.candidates if candidate.is_measured]
    kernel_timer = KernelTimer()
    results: list[speed.ShapeResult] = []
    of_sustained: list[sustained.Sustained] = []
    try:
        _speeds(results, options.shapes, measured, seconds, kernel_timer, rng)
        if kernel_timer.problem is not None:
            print(f"\nno kernel times: {kernel_timer.problem}")
        _sustained(of_sustained, options.sustained, measured, rng)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(results)} of {len(options.shapes)} shapes: what was measured is kept")
    return record.build(
        machine=about,
        settings={"seconds": seconds, "seed": seed, "heat_seconds": heat_seconds},
        candidates=found.candidates,
        missing=found.missing,
        accuracies=accuracies,
        accuracy_failures=accuracy_failures,
        results=results,
        sustained=of_sustained,
        kernel_problem=kernel_timer.problem,
    )


# The two below add to `results` as they go: what an interruption leaves is written.
def _speeds(
    results: list[speed.ShapeResult],
    chosen: Sequence[shapes.Shape],
    candidates: Sequence[BenchmarkCandidate],
    seconds: float,
    kernel_timer: KernelTimer,
    rng: random.Random,
) -> None:
    notes = {candidate.name: candidate.note for candidate in candidates}
    for shape, share in speed.shares(chosen, seconds, time.monotonic):
        try:
            result = speed.measure(shape, candidates, share, kernel_timer, rng)
        except RuntimeError as error:
            # No memory for the inputs, or a peer's kernel has broken CUDA for this process. That is a result, too, and
            # the other shapes are not lost.
            result = speed.ShapeResult(shape, [], {"all candidates": f"{type(error).__name__}: {error}"})
        results.append(result)
        print("", *tables.speed_lines(result, notes), sep="\n", flush=True)


def _sustained(
    results: list[sustained.Sustained],
    chosen: Sequence[shapes.Shape],
    candidates: Sequence[BenchmarkCandidate],
    rng: random.Random,
) -> None:
    if not chosen:
        return
    with sustained.Meter() as meter:
        for shape in chosen:
            print(f"\n{shape}: each alone", flush=True)
            try:
                found, failures = sustained.measure(shape, candidates, rng, meter)
            except RuntimeError as error:  # as for the speeds
                found, failures = [], {"all candidates": f"{type(error).__name__}: {error}"}
            results += found
            lines = [*tables.sustained_lines(found), *(f"{name}: {reason}" for name, reason in failures.items())]
            print("\n".join(lines), flush=True)


def _write(document: dict[str, Any], options: argparse.Namespace, arguments: Sequence[str]) -> int:
    try:
        if options.json is not None:
            record.write(document, options.json)
        if options.results is not None:
            command = " ".join(["python -m lab bench", *arguments])
            print(f"\nwrote {record.write_page(document, options.results, command)}")
    except OSError as error:
        return _fail(f"the result cannot be written: {error}")
    return 0 if document["speed"] else _fail("nothing could be measured: the reasons stand above")
