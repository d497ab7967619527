"""`python -m lab sparse`: one long call of self-attention with key blocks left out, beside comfy-kitchen's Sol-Attn.

    python -m lab sparse --results docs/results  # sparse.md
    python -m lab sparse --build sm80=build/kernels/comfy_sage2_sm80 --results docs/results

Whole calls at Wan 14B's 720p shape, with quantization, the choice of blocks and their lists, in a new random order in
each round. The inputs are random and video-like: queries and keys of a head match if tokens are near each other, and
each head has its own range. Errors are relative L2 of a head on sampled rows, against attention in float32.
Whole samplings follow, in which a choice of blocks serves two steps, as in the node.
Sol-Attn is measured if comfy_kitchen can be imported; a build is a kernel package for this GPU, as for `lab bench`.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any

import torch

from comfy_sage2 import Sparse, attention, metrics
from comfy_sage2.backends.block_kernels import add_tail_
from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.options import AttentionOptions
from comfy_sage2.sparsity.levels import LEVELS

from ..arguments import above_0, add_seed, cuda_device, parser_of
from ..bench.candidates import Call, PreparedCandidate
from ..bench.ours import Build
from ..bench.timing import Timed, heat, time_in_rounds
from ..evaluation.videos import SparseAttention
from ..result_page import page_head, show, table, write
from .sparse_inputs import video_like

HEADS, HEAD_DIM = 40, 128
GRID = (21, 45, 80)  # frames, height and width in tokens
DENSE = "dense 8b"
SHARES, TAIL_SHARES, BOUNDS = (0.58, 0.39, 0.2, 0.1, 0.05), (0.5, 0.2, 0.1, 0.05), (0.02, 0.05, 0.1)
OPTIONS = AttentionOptions("8b", layout="BNHD", rotate="off")
_ROWS, _SECONDS, _HEAT_SECONDS = 384, 60.0, 20.0
_LAYERS, _STEPS, _JUDGED_STEPS = 4, 20, (10, 11)  # of samplings; one judged step chooses blocks, one reuses them
_MODEL_LAYERS = 40

Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k and v (1, N, H, D), some of their rows, and the exact output there (rows, H, D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor
    exact: torch.Tensor


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention in float32 at these rows, (rows, H, D); q, k, v (1, N, H, D)."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return metrics.exact_rows(q, k, v, range(q.shape[1]), rows, scale=None, mask=None)[0].transpose(0, 1)


def errors(out: torch.Tensor, inputs: Inputs) -> tuple[float, float]:
    """Relative L2 of the heads of an output (1, N, H, D) at the sampled rows: their mean, and the largest."""
    lost = (out[0, inputs.rows].float() - inputs.exact).norm(dim=(0, 2)) / inputs.exact.norm(dim=(0, 2))
    return float(lost.mean()), float(lost.max())


def by_build(module: ModuleType, inputs: Inputs, sparse: Sparse) -> torch.Tensor:
    """A sparse call by the kernels of `module`; blocks are chosen by the usual module, of the same source."""
    q, k, v = inputs.q, inputs.k, inputs.v
    blocks = sparse.blocks(q, k, v, OPTIONS, NO_TENSORS)
    assert blocks is not None
    pv = "int8" if "int8" in module.pv_formats else "auto"  # the default of cards without wgmma's FP8
    options = replace(OPTIONS, pv=pv, return_lse=sparse.tail)
    optional = OptionalTensors(block_mask=blocks.mask.lists)
    signature = CallSignature.of(q, k, v, options, optional)
    out, lse = KernelCall(module, signature).run(q, k, v, optional)
    if lse is not None and blocks.tail_lists is not None:
        q, k, v, heads_first = (x.transpose(1, 2) for x in (q, k, v, out))
        add_tail_(module, q, k, v, heads_first, lse, blocks.tail_lists, HEAD_DIM**-0.5)
    return out


def calls(builds: Sequence[Build], inputs: Inputs) -> dict[str, Attend]:
    """Name -> a whole call."""
    q, k, v = inputs.q, inputs.k, inputs.v
    ours = partial(attention, q, k, v, options=OPTIONS, return_lse=False)
    named: dict[str, Attend] = {DENSE: ours}
    named |= {f"bound {bound:g}": partial(ours, sparse=Sparse(bound=bound)) for bound in BOUNDS}
    named |= {f"share {share:.0%}": partial(ours, sparse=Sparse(share=share)) for share in SHARES}
    named |= {f"share {share:.0%}, tail": partial(ours, sparse=Sparse(share=share, tail=True)) for share in TAIL_SHARES}
    for build in builds:
        module = build.load()
        for share in TAIL_SHARES:
            for tail in (False, True):
                name = f"share {share:.0%}{', tail' if tail else ''}, {build.name}"
                named[name] = partial(by_build, module, inputs, Sparse(share=share, tail=tail))
    try:
        sol_attn = importlib.import_module("comfy_kitchen").sol_attn
    except (ImportError, AttributeError) as error:
        print(f"comfy-kitchen's Sol-Attn is left out: {error}", file=sys.stderr)
        return named
    return named | {f"sol_attn, top {share:.0%}": partial(sol_attn, q, k, v, topk_ratio=share) for share in TAIL_SHARES}


def rows(times: Mapping[str, Timed], lost: Mapping[str, tuple[float, float]]) -> list[str]:
    """The table: a row for each call."""
    dense = median(times[DENSE].calls)
    cells = []
    for name, (mean_error, worst) in lost.items():
        rounds = times[name].calls
        spread = f"{min(rounds):.1f} to {max(rounds):.1f}"
        faster = f"{dense / median(rounds):.2f}"
        cells.append([name, f"{median(rounds):.1f}", spread, faster, f"{mean_error:.4f}", f"{worst:.4f}"])
    return table(["call", "ms", "least to most", "times as fast", "error, mean", "worst"], cells)


def _with_lse(options: AttentionOptions, *tensors: torch.Tensor, **blocks: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(*tensors, options=options, return_lse=True, **blocks)


class Sampled:
    """The time and the errors of the attention of samplings."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.errors: list[tuple[float, float]] = []


def samplings(device: torch.device, seed: int) -> list[str]:
    """The table of whole samplings: a row for each level.

    All levels take turns call by call, in a new random order. Each step adds other noise to q, k and v, less from step
    to step.
    """
    options = replace(OPTIONS, layout="BHND", return_lse=True)
    sparse = {name: SparseAttention(partial(_with_lse, options), level) for name, level in LEVELS.items()}
    attend = {DENSE: lambda q, k, v: attention(q, k, v, options=options, return_lse=False)} | sparse
    layers = [video_like(GRID, HEADS, HEAD_DIM, device, seed + layer) for layer in range(_LAYERS)]
    sampled, rng = {name: Sampled() for name in attend}, random.Random(seed)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(_STEPS):
        for level in sparse.values():
            level.begin_step(step, _STEPS)
        for layer in layers:
            noise = 0.5 * (1.0 - step / _STEPS)
            q, k, v = (torch.randn_like(x).mul_(noise).add_(x).transpose(1, 2) for x in layer[:3])
            rows = torch.randperm(q.shape[2], device=device)[:_ROWS]
            judged = None
            if step in _JUDGED_STEPS:
                by_tokens = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                judged = Inputs(*by_tokens, rows, exact_rows(*by_tokens, rows))
            for name in rng.sample(list(attend), len(attend)):
                start.record()
                out = attend[name](q, k, v)
                end.record()
                end.synchronize()
                sampled[name].milliseconds += start.elapsed_time(end)
                if judged is not None:
                    sampled[name].errors.append(errors(out.transpose(1, 2), judged))
    dense = sampled[DENSE].milliseconds
    cells = []
    for name, result in sampled.items():
        seconds = result.milliseconds / 1000 * _MODEL_LAYERS / _LAYERS
        means, worst = zip(*result.errors, strict=True)
        computed = f"{sparse[name].computed_share():.0%}" if name in sparse else "100%"
        faster = f"{dense / result.milliseconds:.2f}"
        cells.append([name, f"{seconds:.1f}", faster, computed, f"{sum(means) / len(means):.4f}", f"{max(worst):.4f}"])
    return table(["", "attention (s)", "times as fast", "blocks in sparse calls", "error, mean", "worst"], cells)


def body(device: torch.device, builds: Sequence[Build], seed: int, seconds: float) -> list[str]:
    """Measure; return the page below its head."""
    q, k, v, _ = video_like(GRID, HEADS, HEAD_DIM, device, seed)
    sampled = torch.randperm(q.shape[1], device=device)[:_ROWS]
    inputs = Inputs(q, k, v, sampled, exact_rows(q, k, v, sampled))
    named = calls(builds, inputs)
    lost = {name: errors(call(), inputs) for name, call in named.items()}
    heat(_HEAT_SECONDS)
    prepared = {name: PreparedCandidate(Call(call), Call(call)) for name, call in named.items()}
    times = time_in_rounds(prepared, seconds, None, random.Random(seed))
    return [
        f"B1 H{HEADS} N{q.shape[1]:,} D{HEAD_DIM}, bf16, random and video-like. Whole calls with quantization, choice "
        "of the blocks and lists: medians of five rounds or more, each in an order drawn anew. *tail*: "
        "`Sparse(share=…, tail=True)`; sol_attn has its own. Errors: relative L2 of a head on "
        f"{_ROWS} rows, their mean and the largest. A bound is measured and met in the call itself; in a sampling a "
        "choice serves two steps.",
        "",
        *rows(times, lost),
        "",
        "## Samplings",
        "",
        f"The attention of {_STEPS} steps, the first 20 % of them dense: {_LAYERS} layers of the same size, times "
        f"{_MODEL_LAYERS // _LAYERS}, with the choices of blocks and tails. Errors of two sparse steps.",
        "",
        *samplings(device, seed),
    ]


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = parser_of("sparse", __doc__, "sparse.md")
    parser.add_argument(
        "--build", action="append", type=Build.parse, default=[], metavar="NAME=FOLDER", help="may be repeated"
    )
    parser.add_argument("--seconds", type=above_0, default=_SECONDS, help=f"for the times (default: {_SECONDS:.0f})")
    add_seed(parser)
    options = parser.parse_args(arguments)
    device = cuda_device("sparse")
    builds = "".join(f" --build {build.name}=FOLDER" for build in options.build)
    lines = page_head(
        "One sparse call beside Sol-Attn",
        device,
        settings="the attention function, `rotate` off",
        command=f"python -m lab sparse{builds} --seed {options.seed} --results docs/results",
    )
    with torch.no_grad():
        lines += body(device, options.build, options.seed, options.seconds)
    write(lines, "sparse", options.results)
    show(lines)
    return 0
