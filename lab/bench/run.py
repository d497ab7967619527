"""`python -m lab bench`: speed, memory and accuracy of the kernels beside the other attentions on this machine.

    python -m lab bench --results docs/results  # attention-GPU.md
    python -m lab bench --build after=build/kernels/comfy_sage2_sm80 --page mma-family --results docs/results

All candidates run in this one process and take turns. Builds are kernel packages for this GPU: INT8 and 16-bit products
of mma.sync run natively on Hopper as they do on Ampere, Ada and Blackwell, so kernels for cards that are not at hand
can be compared there (`python -m tools.build_kernels --arch sm80 --target sm_90`). Several builds, before and after a
change, may be named. The page is rewritten after each shape, so an interrupted run leaves what it has measured.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from itertools import chain

import torch

from comfy_sage2.options import MODES

from ..arguments import above_0, add_seed, cuda_device, parser_of, shown
from ..result_page import gpu_in_a_file_name, page_head, show, write
from . import accuracy, ours, peers, shapes, speed
from .candidates import Candidates
from .kernel_times import KernelTimer
from .page import Measured, body
from .timing import heat

_SHAPES, _BUILD_SHAPES = ("paper", "video", "calls"), ("builds",)
_BUILD_PEERS = ("comfy-kitchen", "sageattention-fp16")
_SECONDS, _HEAT_SECONDS = 270.0, 30.0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("bench", __doc__, "the page")
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME", help=f"names of shapes, or the groups {', '.join(shapes.GROUPS)}"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--peers", nargs="*", choices=list(peers.PEERS), help="only these other attentions")
    parser.add_argument(
        "--build", action="append", type=ours.Build.parse, default=[], metavar="NAME=FOLDER",
        help="kernels to be measured in place of the installed ones; may be repeated",
    )  # fmt: skip
    parser.add_argument("--seconds", type=above_0, default=_SECONDS, help=f"for the times (default: {_SECONDS:.0f})")
    parser.add_argument("--page", help="its name (default: attention-GPU, or mma-family with builds)")
    add_seed(parser)
    options = parser.parse_args(arguments)
    if options.peers is None:
        options.peers = (
            _BUILD_PEERS if options.build else [name for name in peers.PEERS if name not in _BUILD_PEERS[1:]]
        )
    try:
        options.shapes = shapes.select(options.shapes or (_BUILD_SHAPES if options.build else _SHAPES))
    except ValueError as error:
        parser.error(f"argument --shapes: {error}")
    return options


def _find(options: argparse.Namespace) -> Candidates:
    """Ours first, then the peers."""
    if options.build:
        own = Candidates(list(chain(*(ours.of_build(build.name, build.load()) for build in options.build))))
    else:
        own = ours.find(options.modes)
    their = peers.find(options.peers)
    return Candidates(own.able + their.able, own.missing | their.missing)


def main(arguments: list[str]) -> int:
    """Measure and write; 0 when something was measured."""
    options = _parse(arguments)
    device = cuda_device("bench")
    candidates = _find(options)
    rng, timer = random.Random(options.seed), KernelTimer()
    measured = Measured(candidates.able, candidates.missing)
    head = page_head(
        f"Attention calls{' of builds' if options.build else ''} on one {torch.cuda.get_device_name(device)}",
        device,
        settings="the attention function; `rotate` on auto unless a row says otherwise, in builds off",
        command=f"{shlex.join(['python', '-m', 'lab', 'bench', *shown(arguments)])}` with seed `{options.seed}",
    )
    name = options.page or ("mma-family" if options.build else f"attention-{gpu_in_a_file_name(device)}")
    with torch.no_grad():
        for head_dim in dict.fromkeys(shape.head_dim for shape in options.shapes):
            measured.accuracy[head_dim] = accuracy.measure(candidates.able, accuracy.of_head_dim(head_dim))
        heat(_HEAT_SECONDS)
        timed = [candidate for candidate in candidates.able if candidate.is_timed]
        for shape, seconds in speed.shares(options.shapes, options.seconds, time.monotonic):
            try:
                result = speed.measure(shape, timed, seconds, timer, rng)
            except RuntimeError as error:
                # There is no memory for the inputs, or a peer's kernel broke CUDA for this process. That is a result
                # too, and must not lose those of other shapes.
                result = speed.ShapeResult(shape, {}, {"all candidates": f"{type(error).__name__}: {error}"})
            measured.results.append(result)
            measured.kernel_problem = timer.problem
            print(f"measured {shape}", file=sys.stderr, flush=True)
            write([*head, *body(measured)], name, options.results)
    show([*head, *body(measured)])
    return 0 if any(result.speeds for result in measured.results) else 1
