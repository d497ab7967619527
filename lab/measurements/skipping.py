"""Whole videos with key blocks left out, by lists that are made in some steps and used in the others.

    python -m lab skip --results docs/results

The demo model samples each caption with the reference in 8b: dense, and at each level of skipping. Blocks are found in
steps 1, 4, 9 and 16 from what a kernel of sm90 has met of the scores of that step, each head with the loosest threshold
whose measured error is within the level's bound (`comfy_sage2.sparsity`).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from comfy_sage2 import machine
from comfy_sage2.block_mask import BLOCK_TOKENS, BlockMask, blocks_of
from comfy_sage2.command_line import Parser, at_least_1, output_folder, seed_number
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.block_margins import block_margins
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.sparsity.controller import SparsityController, values
from comfy_sage2.sparsity.levels import LEVELS
from comfy_sage2.sparsity.mask_cache import PassKey
from tools.progress import ProgressBar

from ..demo.captions import CaptionEncoder
from ..demo.metrics import psnr
from ..demo.model import TRAINED_FOLDER, DemoModel
from ..demo.sampler import decode, denoise, pixels, starting_noise
from ..demo.scenes import random_scene
from ..demo.wan_dit import WanDiT
from ..demo.wan_vae import WanVAE

DENSE = "dense"
# Steps of a block, their order, sums of rounded P: as the kernels of sm90.
_NUMERICS = replace(
    ReferenceOptions.of(AttentionOptions("8b", rotate="off"), dtype=torch.float32),
    keys_per_step=BLOCK_TOKENS,
    last_keys_first=True,
    diagonal_early=True,
    sum_quantized_p=True,
)
_SIDE, _FRAMES = 256, 33


class DemoSparsity:
    """The self-attention of one sampling at one level; None is dense. `step` is set from outside."""

    def __init__(self, level: str | None) -> None:
        self._controller = None if level is None else SparsityController(level)
        self.step = 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output of a layer in `step`."""
        controller, finds, active = self._controller, False, None
        if controller is not None:
            finds = controller.finds(layer, PassKey(self.step), q, k)
            lists = None if finds else controller.lists(layer, PassKey(self.step), q, k)
            active = lists.to_dense() if isinstance(lists, BlockMask) else None
        out, _ = reference_attention(q, k, v, _NUMERICS, active_blocks=active)
        if controller is not None and finds:
            margins = block_margins(q, k, _NUMERICS, running=True)
            controller.find(layer, PassKey(self.step), q, k, v, margins, 1.0 / math.sqrt(q.shape[3]))
        return out.to(q.dtype)

    @property
    def computed(self) -> list[float]:
        """Shares of the blocks that calls with lists computed."""
        return [] if self._controller is None else values(self._controller.all_figures.computed)

    @property
    def found(self) -> list[float]:
        """For each call in which blocks were found, the largest error of a head."""
        return [] if self._controller is None else values(self._controller.all_figures.found)


@dataclass(frozen=True)
class SkippedClip:
    """What came of one caption at one level, beside the dense video."""

    computed: float
    blocks: float
    psnr: float
    cosine: float
    worst_found: float


class Sampler:
    """The demo model on the CPU."""

    def __init__(self, model: DemoModel, steps: int) -> None:
        self._dit, self._vae = WanDiT.load(model.dit), WanVAE.load(model.vae)
        self._encoder, self._steps = CaptionEncoder.load(model.captions), steps

    def sample(self, caption: str, seed: int, skipping: DemoSparsity) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents, and pixels (frames, height, width, 3) uint8."""
        for layer, (self_attention, _) in enumerate(self._dit.attentions()):

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = layer) -> torch.Tensor:
                return skipping.attend(layer, q, k, v)

            self_attention.attend = attend

        def before_step(step: int) -> None:
            skipping.step = step

        noise = starting_noise(seed, width=_SIDE, height=_SIDE, frames=_FRAMES)
        latents = denoise(self._dit, self._encoder, [caption], noise, steps=self._steps, before_step=before_step)
        return latents, pixels(decode(self._vae, latents)[0])


def clips(sampler: Sampler, caption: str, seed: int) -> Iterator[tuple[str, SkippedClip]]:
    """Each level's video of one caption."""
    dense_latents, dense_video = sampler.sample(caption, seed, DemoSparsity(None))
    for level in LEVELS:
        skipping = DemoSparsity(level)
        latents, video = sampler.sample(caption, seed, skipping)
        shares, found = skipping.computed, skipping.found
        computed = sum(shares) / len(shares)
        used = len(shares) / (len(shares) + len(found))
        yield (
            level,
            SkippedClip(
                computed,
                1.0 - used * (1.0 - computed),
                psnr(video, dense_video),
                Agreement.of(latents, dense_latents).cosine,
                max(found),
            ),
        )


def rows(found: dict[str, list[SkippedClip]]) -> Iterator[str]:
    """Markdown: a row for each level, means over the captions and the worst of them."""
    yield "| level | bound | blocks with lists | blocks in all | PSNR (dB) | worst | latent cosine | error found |"
    yield "| --- " * 8 + "|"
    for level, made in found.items():
        count = len(made)
        decibels = [clip.psnr for clip in made]
        yield (
            f"| {level} | {LEVELS[level]:g} | {sum(clip.computed for clip in made) / count:.1%} | "
            f"{sum(clip.blocks for clip in made) / count:.1%} | {sum(decibels) / count:.1f} | {min(decibels):.1f} | "
            f"{sum(clip.cosine for clip in made) / count:.5f} | {max(clip.worst_found for clip in made):.4f} |"
        )


def page(command: str, captions: int, steps: int, lines: Sequence[str]) -> str:
    """The whole page of docs/results."""
    tokens = (_FRAMES + 3) // 4 * (_SIDE // 16) ** 2
    return "\n".join(
        [
            "# Skipped blocks in whole videos",
            "",
            f"- Machine: {machine.summary(torch.device('cpu'))}; the reference, no kernel.",
            f"- Command: `{command}`, which wrote this page.",
            f"- Date: {date.today().isoformat()}.",
            "",
            f"Captions of the demo model: {captions}; {steps} steps, 8b, against the same video without skipping. Its "
            f"self-attention has {tokens:,} tokens, {blocks_of(tokens)} x {blocks_of(tokens)} blocks a head. Blocks "
            "are found in steps 1, 4, 9 and so on, in the order of keys of sm90's kernels. The bound is the relative "
            "L1 that a head may lose on a sample of its rows in such a step; *error found* is the largest that a head "
            "in fact lost there. Blocks: the share that is computed, in the steps with lists and in all.",
            "",
            *lines,
            "",
            "Later steps are not measured by that sample: what they lose shows in PSNR and cosine.",
        ]
    )


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab skip", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=TRAINED_FOLDER, help="folder of the trained demo model")
    parser.add_argument("--captions", type=at_least_1, default=4)
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--steps", type=at_least_1, default=20)
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write skipping.md there")
    options = parser.parse_args(arguments)
    model = DemoModel(options.model, trained=True)
    for path in (model.dit, model.vae, model.captions):
        if not path.is_file():
            parser.error(f"argument --model: {path} is missing; name the folder of the trained demo model")
    rng = random.Random(options.seed)
    found: dict[str, list[SkippedClip]] = {level: [] for level in LEVELS}
    with torch.no_grad(), ProgressBar("captions") as progress:
        sampler = Sampler(model, options.steps)
        for number in range(options.captions):
            for level, clip in clips(sampler, random_scene(rng).caption(), options.seed + number):
                found[level].append(clip)
            progress((number + 1) / options.captions)
    command = " ".join(["python -m lab skip", *arguments])
    text = page(command, options.captions, options.steps, list(rows(found))) + "\n"
    print(text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "skipping.md").write_text(text, encoding="utf-8")
    return 0
