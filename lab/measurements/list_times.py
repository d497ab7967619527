"""How much faster a call is with tile lists than dense, by the share of dead tiles.

    python -m lab lists

The dead tiles are drawn at random for each head and block of queries. Whole calls are timed, with their quantization
and the preparation of the lists; dense and listed calls take turns in an order drawn anew each round. Needs a GPU whose
kernels take tile lists.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from comfy_sage2 import attention, explain, machine
from comfy_sage2.benchmark.settle import heat
from comfy_sage2.benchmark.timing import Turn, visit
from comfy_sage2.command_line import Parser, at_least_1, seed_number
from comfy_sage2.options import AttentionOptions
from comfy_sage2.tiles import TileLists, tiles_of

from ..arguments import cuda_device

MODES = ("8b", "precise")
HEAD_DIMS = (64, 128, 256)
SHARES = (0.0, 0.28, 0.48, 0.69)  # of dead tiles
DENSE = "dense"
_HEADS = 32
_ROUNDS = 7
_HEAT_SECONDS = 0.1


def calls(
    mode: str, head_dim: int, tokens: int, *, is_causal: bool = False
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The dense call and those with lists, by name; SystemExit where no kernel takes lists."""
    q, k, v = (torch.randn(1, _HEADS, tokens, head_dim, device="cuda", dtype=torch.float16) for _ in range(3))
    options = AttentionOptions(mode, is_causal=is_causal)
    run = partial(attention, q, k, v, options=options, return_lse=False)
    yield DENSE, run
    tiles = tiles_of(tokens)
    for share in SHARES:
        live = torch.rand(1, _HEADS, tiles, tiles, device="cuda") >= share
        lists = TileLists.of_mask(live, is_causal=is_causal)
        reasons = explain(q, k, v, tiles=lists, options=options)
        if all(reason is not None for name, reason in reasons.items() if name != "reference"):
            raise SystemExit("; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None))
        yield f"{share:.0%}", partial(run, tiles=lists)


def in_turns(subjects: dict[str, Callable[[], torch.Tensor]], rng: random.Random) -> dict[str, float]:
    """Median milliseconds a call of each subject."""
    turns = {name: Turn.of(visit(run, Turn(1, 1))) for name, run in subjects.items()}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(_ROUNDS):
        rng.shuffle(order)
        heat(_HEAT_SECONDS)
        for name in order:
            times[name].append(visit(subjects[name], turns[name]))
    return {name: median(values) for name, values in times.items()}


def row(mode: str, head_dim: int, tokens: int, rng: random.Random, *, is_causal: bool) -> str:
    """One line of the table."""
    found = in_turns(dict(calls(mode, head_dim, tokens, is_causal=is_causal)), rng)
    dense = found.pop(DENSE)
    listed = " | ".join(f"{time:.3f} ({dense / time:.2f})" for time in found.values())
    return f"| {mode} | {head_dim} | {'yes' if is_causal else 'no'} | {dense:.3f} | {listed} |"


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = Parser(
        prog="python -m lab lists", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=at_least_1, default=16384, help="of q, k and v (default: 16384)")
    parser.add_argument("--seed", type=seed_number, default=0, help="of the order of turns")
    options = parser.parse_args(arguments)
    device = cuda_device("lists")
    print(
        f"{machine.summary(device)}; {_HEADS} heads, {options.tokens} tokens, fp16; milliseconds a call (times dense)"
    )
    print(f"| mode | head_dim | causal | {DENSE} | {' | '.join(f'{share:.0%} dead' for share in SHARES)} |")
    print("| --- " * (len(SHARES) + 4) + "|")
    rng = random.Random(options.seed)
    for is_causal in (False, True):
        for mode in MODES:
            for head_dim in HEAD_DIMS:
                print(row(mode, head_dim, options.tokens, rng, is_causal=is_causal), flush=True)
    return 0
