"""How many key blocks hold next to no probability, and what leaving them out costs.

    python -m lab tiles --results docs/results

The tensors are the demo model's self-attention while it samples, and synthetic ones of a video. The lists are made from
the scores of the same call (`comfy_sage2.reference.block_margins`), and the reference in 8b computes with them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from comfy_sage2 import machine
from comfy_sage2.block_mask import BLOCK_TOKENS, BlockMask
from comfy_sage2.command_line import Parser, at_least_1, output_folder
from comfy_sage2.metrics import compare
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.block_margins import LOSSLESS, block_margins
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.options import ReferenceOptions
from tools.progress import ProgressBar

from ..capture.samples import AttentionSample
from ..demo.captions import CaptionEncoder
from ..demo.model import TRAINED_FOLDER, DemoModel
from ..demo.wan_dit import WanDiT
from ..evaluation.demo_capture import demo_samples
from ..evaluation.synthetic_video import HEIGHTS, NARROWEST, NOISE, WIDEST, video_samples

# What is said of a threshold -> the threshold in log2, for the largest P of a block.
THRESHOLDS = {"lossless": LOSSLESS} | {text: math.log2(float(text)) for text in ("1e-4", "1e-3", "1e-2")}
GRID = (8, 16, 32)  # frames, rows and columns of the synthetic video
OPTIONS = AttentionOptions("8b")


@dataclass(frozen=True)
class SkippedShares:
    """One call: threshold -> the share of skipped blocks and the relative L1 against float64 of the call without them.

    last_first, diagonal_early: the shares by what an online softmax has met that takes the last keys first, or after
    the last block the one on the diagonal, as the kernels of sm90 do.
    """

    dense: float
    shares: dict[str, float]
    errors: dict[str, float]
    last_first: dict[str, float]
    diagonal_early: dict[str, float]


def measured(sample: AttentionSample) -> SkippedShares:
    """Measure one call of the reference with and without block masks."""
    numerics = ReferenceOptions.of(OPTIONS, dtype=sample.q.dtype)
    exact, _ = exact_attention(sample.q, sample.k, sample.v, scale=sample.scale)

    def error(active: torch.Tensor | None) -> float:
        out, _ = reference_attention(sample.q, sample.k, sample.v, numerics, scale=sample.scale, active_blocks=active)
        return float(compare(out, exact)[1])

    def skipped(margins: torch.Tensor) -> dict[str, float]:
        return {name: float((margins <= threshold).float().mean()) for name, threshold in THRESHOLDS.items()}

    def running(ordered: ReferenceOptions) -> torch.Tensor:
        return block_margins(sample.q, sample.k, ordered, scale=sample.scale, running=True)

    margins = block_margins(sample.q, sample.k, numerics, scale=sample.scale)
    active = {name: BlockMask.from_dense(margins > threshold).to_dense() for name, threshold in THRESHOLDS.items()}
    by_block = replace(numerics, keys_per_step=BLOCK_TOKENS, last_keys_first=True)
    return SkippedShares(
        error(None),
        skipped(margins),
        {name: error(mask) for name, mask in active.items()},
        skipped(running(by_block)),
        skipped(running(replace(by_block, diagonal_early=True))),
    )


def rows(name: str, found: Sequence[SkippedShares]) -> Iterator[str]:
    """The rows of a table for the calls `found`: means, and the worst of their errors."""
    dense = [one.dense for one in found]
    for threshold in THRESHOLDS:
        shares, errors = ([getattr(one, field)[threshold] for one in found] for field in ("shares", "errors"))
        spread = f"{min(shares):.0%} to {max(shares):.0%}" if len(found) > 1 else "—"
        yield (
            f"| {name} | {threshold} | {sum(shares) / len(shares):.1%} | {spread} | {sum(errors) / len(errors):.4f} | "
            f"{sum(dense) / len(dense):.4f} | {max(errors):.4f} | {max(dense):.4f} |"
        )


def order_rows(name: str, found: Sequence[SkippedShares]) -> Iterator[str]:
    """The rows of the table of orders for the calls `found`: means."""
    for threshold in THRESHOLDS:
        means = (
            sum(getattr(one, field)[threshold] for one in found) / len(found)
            for field in ("shares", "last_first", "diagonal_early")
        )
        yield f"| {name} | {threshold} | {' | '.join(f'{mean:.1%}' for mean in means)} |"


def measured_sources(
    sources: dict[str, Sequence[AttentionSample]], progress: Callable[[float], None]
) -> dict[str, list[SkippedShares]]:
    """Every call of every source."""
    calls = sum(map(len, sources.values()))
    found: dict[str, list[SkippedShares]] = {name: [] for name in sources}
    for done, (name, sample) in enumerate((name, sample) for name, samples in sources.items() for sample in samples):
        progress(done / calls)
        found[name].append(measured(sample))
    return found


def table(found: dict[str, list[SkippedShares]]) -> Iterator[str]:
    """Markdown: every source with every threshold."""
    yield "| calls | threshold | skipped blocks | least to most | relative L1 | dense | worst call | worst dense |"
    yield "| --- " * 8 + "|"
    for name, calls in found.items():
        yield from rows(name, calls)


def order_table(found: dict[str, list[SkippedShares]]) -> Iterator[str]:
    """Markdown: skipped blocks by the maximum that they are compared with."""
    yield "| calls | threshold | whole row | last keys first | then the diagonal |"
    yield "| --- " * 5 + "|"
    for name, calls in found.items():
        yield from order_rows(name, calls)


def page(command: str, found: dict[str, list[SkippedShares]], device: torch.device) -> str:
    """The whole page of docs/results."""
    frames, height, width = GRID
    return "\n".join(
        [
            "# Skipped blocks",
            "",
            f"- Machine: {machine.summary(device)}; the reference, no kernel.",
            f"- Command: `{command}`, which wrote this page.",
            f"- Date: {date.today().isoformat()}.",
            "",
            "A block is 128 queries x 128 keys. It is skipped when no P in it is above the threshold, relative to the "
            "largest P of its row over all keys; *lossless* is 2^-18.81, below which E4M3 rounds P to zero. Relative "
            "L1 is against attention in float64, without the skipped blocks and beside it dense, both in 8b: means "
            "over the calls, then the worst call.",
            "",
            f"The synthetic video has {frames} x {height} x {width} tokens. Its scores fall off as a Gaussian around "
            f"the query's own place, {NARROWEST} to {WIDEST} tokens wide by head, and so many nats high as the row "
            f"says; noise of deviation {NOISE} lies on Q and K.",
            "",
            *table(found),
            "",
            "A threshold is no bound of the error: tokens that attend to everything a little lose most. Large models, "
            "and lists of one step that are used in the next, are not measured here. Kernels of ABI 4 take lists "
            "([times](list-times.md)).",
            "",
            "## By the order of the keys",
            "",
            "A kernel knows the largest score of a row that it has met so far. Skipped blocks by that maximum, when "
            "the last keys come first, and when the block at the query's own place, on the diagonal, follows the last "
            "one, as in the kernels of sm90:",
            "",
            *order_table(found),
        ]
    )


def _demo(options: argparse.Namespace) -> list[AttentionSample]:
    model = DemoModel(options.model, trained=True)
    with ProgressBar("sampling the demo model") as progress:
        return demo_samples(
            WanDiT.load(model.dit),
            CaptionEncoder.load(model.captions),
            seed=options.seed,
            steps=options.steps,
            every_step=options.every_step,
            progress=progress,
        )


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab tiles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=TRAINED_FOLDER, help="folder of the trained demo model")
    parser.add_argument("--only", choices=("demo", "synthetic"), help="which tensors; default: both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=at_least_1, default=20, help="sampling steps of the demo model")
    parser.add_argument("--every-step", type=at_least_1, default=10, help="which of them are captured")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write tile-lists.md there")
    options = parser.parse_args(arguments)
    model = DemoModel(options.model, trained=True)
    for path in (model.dit, model.captions) if options.only != "synthetic" else ():
        if not path.is_file():
            parser.error(f"argument --model: {path} is missing; name the folder of the trained demo model")
    with torch.no_grad():
        sources: dict[str, Sequence[AttentionSample]] = {}
        if options.only != "synthetic":
            samples = _demo(options)
            sources[f"demo model, {len(samples)} calls of {samples[0].q.shape[2]:,} tokens"] = samples
        if options.only != "demo":
            for peak in HEIGHTS:
                frames, height, width = GRID
                sources[f"synthetic video, {peak:.0f} nats"] = video_samples(
                    options.seed, frames=frames, height=height, width=width, peaks=(peak,)
                )
        with ProgressBar("measuring") as progress:
            found = measured_sources(sources, progress)
    text = page(" ".join(["python -m lab tiles", *arguments]), found, torch.device("cpu")) + "\n"
    print(text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "tile-lists.md").write_text(text, encoding="utf-8")
    return 0
