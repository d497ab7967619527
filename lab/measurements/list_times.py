"""How much faster a call is with a block mask than dense.

    python -m lab lists --results docs/results

The skipped blocks are drawn at random for each head and block of queries. Whole calls, with their quantization and the
preparation of the lists, are timed by CUDA events, attention kernels alone by the profiler. Dense and other calls take
turns in an order drawn anew in each round. Needs a GPU whose kernels take block masks.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from comfy_sage2 import attention, explain, machine, registry
from comfy_sage2.block_mask import BlockMask, blocks_of
from comfy_sage2.command_line import Parser, at_least_1, given_or_new_seed, output_folder, seed_number
from comfy_sage2.kernels import loader
from comfy_sage2.options import AttentionOptions

from ..arguments import cuda_device
from ..bench.candidates import Call, PreparedCandidate
from ..bench.kernel_times import KernelTimer
from ..bench.ours import attention_kernels
from ..bench.settle import heat
from ..bench.timing import Timed, time_in_rounds
from ..result_page import page_head, show

MODES = ("8b", "precise")
HEAD_DIMS = (64, 128, 256)
SHARES = (0.0, 0.28, 0.48, 0.69)  # of skipped blocks
DENSE = "dense"
LISTED = tuple(f"{share:.0%} skipped" for share in SHARES)
HEADS, TOKENS = 32, 16384
_SECONDS = 5  # for each row of the tables
_HEAT_SECONDS = 30.0
_NOT_MEASURED = "–"


@dataclass(frozen=True)
class BlockMaskCase:
    """A mode at one head_dim."""

    mode: str
    head_dim: int
    is_causal: bool

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.mode, is_causal=self.is_causal, rotate="off")

    def row(self, times: Mapping[str, float]) -> str:
        """A row of a table: milliseconds by name, and behind each how many times as fast as the dense call it is."""
        dense = times.get(DENSE)
        cells = [self.mode, str(self.head_dim), "yes" if self.is_causal else "no"]
        for name in (DENSE, *LISTED):
            if name not in times or dense is None:
                cells.append(_NOT_MEASURED)
            else:
                cells.append(f"{times[name]:.3f}" + ("" if name == DENSE else f" ({dense / times[name]:.2f})"))
        return f"| {' | '.join(cells)} |"


CASES = tuple(
    BlockMaskCase(mode, head_dim, is_causal) for is_causal in (False, True) for mode in MODES for head_dim in HEAD_DIMS
)


def subjects(case: BlockMaskCase, tokens: int, device: torch.device) -> tuple[str, dict[str, PreparedCandidate]]:
    """The backend, and by name the dense call, and those with lists.

    SystemExit where no kernel takes lists.
    """
    shape = (1, HEADS, tokens, case.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(3))
    blocks = blocks_of(tokens)
    run = partial(attention, q, k, v, options=case.options, return_lse=False)
    calls = {DENSE: run}
    for name, share in zip(LISTED, SHARES, strict=True):
        active = torch.rand(1, HEADS, blocks, blocks, device=device) >= share
        calls[name] = partial(run, block_mask=BlockMask.from_dense(active, is_causal=case.is_causal))
    reasons = explain(
        q, k, v, block_mask=BlockMask.full(tokens, tokens, heads=HEADS, device=device), options=case.options
    )
    backend = next((name for name, reason in reasons.items() if reason is None and name != "reference"), None)
    if backend is None:
        raise SystemExit("; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None))
    kernel_name = attention_kernels(backend, case.mode)
    return backend, {name: PreparedCandidate(Call(call), Call(call), kernel_name) for name, call in calls.items()}


def _medians(times: Mapping[str, Timed]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of whole calls and of their attention kernels, by name."""
    calls = {name: median(one.calls) for name, one in times.items()}
    return calls, {name: median(one.kernels) for name, one in times.items() if one.kernels}


def page(command: str, device: torch.device, tokens: int, seed: int, seconds: float) -> str:
    """The whole page of docs/results; tells on stderr how far it is."""
    rng = random.Random(seed)
    timer = KernelTimer()
    backend = ""
    calls, kernels = [], []
    heat(_HEAT_SECONDS)
    for case in CASES:
        backend, measured = subjects(case, tokens, device)
        times = time_in_rounds(measured, seconds, timer, rng)
        of_calls, of_kernels = _medians(times)
        calls.append(case.row(of_calls))
        kernels.append(case.row(of_kernels))
        print(calls[-1], file=sys.stderr, flush=True)
    least_skipped = ", ".join(f"{registry.get(backend).least_skipped(mode):.0%} ({mode})" for mode in MODES)
    head = [
        f"| mode | head_dim | causal | {' | '.join((DENSE, *LISTED))} |",
        "| --- " * (len(LISTED) + 4) + "|",
    ]
    lines = [
        *page_head(
            "Calls with block masks",
            machine=machine.summary(device),
            kernels=f"{backend} {loader.load(backend).version}",
            settings="the attention function, `rotate` off",
            command=command,
            seed=seed,
        ),
        f"{HEADS} heads, {tokens:,} tokens, fp16, blocks left out at random; milliseconds, and in brackets how many "
        "times as fast as the dense call. Medians of five rounds or more, each in an order drawn anew; the GPU "
        f"multiplies matrices for {_HEAT_SECONDS:.0f} s before.",
        "",
        "## Whole calls",
        "",
        *head,
        *calls,
        "",
        "## Attention kernels alone",
        "",
        timer.problem or "By CUPTI.",
        "",
        *head,
        *kernels,
        "",
        "What lies above the diagonal is left out of causal calls with and without lists. The node takes lists where "
        f"at least {least_skipped} of the blocks are skipped. On Hopper *precise* has three consumer warpgroups and "
        "192 queries a block without lists, with them two and 128.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = Parser(
        prog="python -m lab lists", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=at_least_1, default=TOKENS, help=f"of q, k and v (default: {TOKENS:,})")
    parser.add_argument(
        "--seconds", type=at_least_1, default=_SECONDS, help=f"for each row of the tables (default: {_SECONDS})"
    )
    parser.add_argument("--seed", type=seed_number, help="of the order of turns (default: another one in every run)")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write list-times.md there")
    options = parser.parse_args(arguments)
    seed = given_or_new_seed(options.seed)
    command = " ".join(["python -m lab lists", *arguments])
    with torch.no_grad():
        text = page(command, cuda_device("lists"), options.tokens, seed, options.seconds)
    show(text, "list-times", options.results)
    return 0
