"""`python -m lab sparse-rows`: heads' errors over all of their rows, compared with the bound for sampled rows.

    python -m lab sparse-rows --results docs/results  # sparse-rows.md

Blocks are chosen as in the node, but in calls of any length; everything else is float32. The inputs are every kind of
`sparse_inputs`, and self-attention of the demo model, which samples in full precision.
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain, product

import torch
from torch.nn.functional import scaled_dot_product_attention

from comfy_sage2.block_mask import BLOCK_TOKENS
from comfy_sage2.sparsity.call_blocks import CallBlocks, add_tail_
from comfy_sage2.sparsity.choices import BlockChoices, ChoiceKey, Moment
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import LEVELS

from ..arguments import add_device, parser_of
from ..demo.job import Job
from ..demo.model import DemoModel, ReplacedAttention, starting_noise
from ..demo.scenes import random_scene
from ..result_page import page_head, show, table, write
from .sparse_inputs import KINDS, made

MOST_ON_AVERAGE, MOST = 1.3, 2.0  # times the bound: the mean of an input's heads, and each head
_BOUNDED = [(level, level.bound) for level in LEVELS.values() if level.bound is not None]
_GRID, _HEADS, _HEAD_DIM, _SEEDS = (8, 32, 32), 4, 64, 3
_LONG_GRID, _LONG = (24, 32, 32), ("video-like", "video-like, diffuse", "one global key, diffuse")
_CAPTIONS, _STEPS, _CAPTURED_STEPS = 2, 20, (4, 10, 18)  # the first sparse step, one in the middle, the last choice

NamedInputs = Iterator[tuple[str, Inputs]]


def output(inputs: Inputs, blocks: CallBlocks) -> torch.Tensor:
    """Attention with these blocks and their tails in float32, (B, H, N, D)."""
    q, k, v = (x.float() for x in inputs[:3])
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    keys = blocks.mask.to_dense().repeat_interleave(BLOCK_TOKENS, dim=3)[..., : k.shape[2]]
    for entry, head, block in product(*map(range, keys.shape[:3])):
        rows = entry, head, slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        active = keys[entry, head, block]
        scores = q[rows] @ k[entry, head, active].T * inputs.scale
        lse[rows] = scores.logsumexp(dim=1)
        out[rows] = scores.softmax(dim=1) @ v[entry, head, active]
    add_tail_(blocks, q, k, v, out, lse, "BHND", inputs.scale)
    return out


def lost(inputs: Inputs, sample: int) -> torch.Tensor:
    """For each bound: the heads' errors over all rows, divided by the bound; shares of the blocks; which have a tail.

    Float32 (bounds, 3, B * H); sample: the number of the sampled rows.
    """
    q, k, v = (x.float() for x in inputs[:3])
    exact = scaled_dot_product_attention(q, k, v, scale=inputs.scale)
    key = ChoiceKey(0, tuple(inputs.q.shape), inputs.k.shape[2], inputs.q.device)
    figures = []
    for level, bound in _BOUNDED:
        blocks = BlockChoices(level).blocks(key, Moment(sample), inputs)
        assert blocks is not None  # it is None only if blocks of an earlier step skip too few
        errors = (output(inputs, blocks) - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3)) / bound
        counts = blocks.mask.lists[..., 0].float()
        tails = torch.zeros_like(errors)
        if blocks.tail_lists is not None:
            tails = (blocks.tail_lists[..., 0] < counts.shape[2]).any(dim=2)
        figures.append(torch.stack((errors, counts.mean(dim=2) / counts.shape[2], tails)).flatten(1))
    return torch.stack(figures)


def made_inputs(device: torch.device, seed: int) -> NamedInputs:
    """Every kind with several seeds, and some so long that heads may have tails."""
    sizes = [(name, _GRID, seed + number) for name in KINDS for number in range(_SEEDS)]
    for name, grid, input_seed in [*sizes, *((name, _LONG_GRID, seed) for name in _LONG)]:
        *qkv, always = made(name, grid, _HEADS, _HEAD_DIM, device, input_seed)
        q, k, v = (x.transpose(1, 2) for x in qkv)
        yield f"{name}{', long' * (grid is _LONG_GRID)}", Inputs(q, k, v, _HEAD_DIM**-0.5, always=always)


def captured_inputs(device: torch.device, seed: int) -> NamedInputs:
    """Calls of the demo model's layers by caption and step, each with its caption and without, in bfloat16."""
    calls: defaultdict[int, list[list[torch.Tensor]]] = defaultdict(list)  # of each step
    step = 0

    def begin_step(number: int) -> None:
        nonlocal step
        step = number

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if step in _CAPTURED_STEPS and q.shape == k.shape:
            calls[step].append([x.bfloat16() for x in (q, k, v)])
        return scaled_dot_product_attention(q, k, v)

    rng, job = random.Random(seed), Job(frames=33)
    captions = [random_scene(rng).caption() for _ in range(_CAPTIONS)]
    noise = [starting_noise(seed + n, width=job.width, height=job.height, frames=job.frames) for n in range(_CAPTIONS)]
    with ReplacedAttention(attend):
        DemoModel(device).denoise(captions, torch.cat(noise), steps=_STEPS, before_step=begin_step)
    for caption, number in product(range(_CAPTIONS), _CAPTURED_STEPS):
        for call in calls[number]:
            q, k, v = (x[caption::_CAPTIONS] for x in call)
            yield f"demo, caption {caption}, step {number}", Inputs(q, k, v, q.shape[3] ** -0.5)


def body(results: Mapping[str, torch.Tensor]) -> list[str]:
    """The page below its head; results: for each input what `lost` returns, for all seeds or layers together."""
    header = [f"{bound:g}: {what}" for _, bound in _BOUNDED for what in ("mean", "worst", "blocks")]
    means = torch.stack([figures[:, 0].mean(dim=1) for figures in results.values()])  # (inputs, bounds)
    worst = torch.stack([figures[:, 0].amax(dim=1) for figures in results.values()])
    above = int((means > MOST_ON_AVERAGE).sum() + (worst > MOST).sum())
    cells = []
    for row, (name, figures) in enumerate(results.items()):
        cells.append([name])
        for bound, (_, shares, tails) in enumerate(figures):
            cells[-1] += [_marked(means[row, bound], MOST_ON_AVERAGE), _marked(worst[row, bound], MOST)]
            cells[-1].append(f"{shares.mean():.0%}" + f", {int(tails.sum())} tails" * bool(tails.any()))
    return [
        "*mean* and *worst*: relative L2 of heads over all rows, divided by the bound. The largest are "
        f"{means.max():.2f} and {worst.max():.2f}. **Bold** is above {MOST_ON_AVERAGE:g} in the mean or {MOST:g} for "
        f"the worst: {above} of {2 * means.numel()} figures of {len(results)} inputs. A head that computes all blocks "
        "counts as 0.",
        "",
        f"*blocks*: the share that heads compute. Made inputs have {_HEADS} heads and {math.prod(_GRID):,} tokens with "
        f"{_SEEDS} seeds, or {math.prod(_LONG_GRID):,} with one (*long*); *demo* are the layers of the demo model, "
        "two heads of each with a caption and two without. The node leaves calls as short as these dense. All blocks "
        "were chosen in the call itself.",
        "",
        *table(["input", *header], cells),
    ]


def _marked(error: torch.Tensor, most: float) -> str:
    return f"**{error:.2f}**" if error > most else f"{error:.2f}"


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = parser_of("sparse-rows", __doc__, "sparse-rows.md")
    add_device(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and the sampled rows (default: 0)")
    options = parser.parse_args(arguments)
    device, seed = options.device, options.seed
    results: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    with torch.no_grad():
        for number, (name, inputs) in enumerate(chain(made_inputs(device, seed), captured_inputs(device, seed))):
            print(name, file=sys.stderr, flush=True)
            results[name].append(lost(inputs, seed + number).cpu())
    lines = page_head(
        "Errors of sparse attention over all rows",
        device,
        settings="blocks as `sparse` chooses them, attention in float32",
        command=f"python -m lab sparse-rows --seed {seed} --results docs/results",
    )
    lines += body({name: torch.cat(figures, dim=2) for name, figures in results.items()})
    write(lines, "sparse-rows", options.results)
    show(lines)
    return 0
