"""Whole videos with sparse attention: what a bound of each head's error costs and saves, beside rules without one.

    python -m lab sparse --device cuda --captions 32 --results docs/results

The demo model samples each caption in full precision, dense in 8b, and with key blocks left out: by bounds, as the node
does (`comfy_sage2.sparsity`); by one share for all heads; by the rules of Sol-Attn (arXiv 2607.24027), which give the
blocks that are left out one pooled key each. The first steps are dense. Blocks of 128 tokens are computed in 8b, by
kernels where there are some, blocks of 64 by exact attention with a mask. All else is float32 in every design: in
bfloat16 the rest of the model alone would put the videos 36 dB apart.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch
from torch.nn import functional as F

from comfy_sage2 import attention, machine
from comfy_sage2.block_mask import BLOCK_TOKENS, BlockMask
from comfy_sage2.command_line import Parser, at_least_1, output_folder, seed_number
from comfy_sage2.reference.block_scores import POOL_TOKENS, pool_tokens
from comfy_sage2.sparsity.choices import BlockChoices, ChoiceKey, Moment
from comfy_sage2.sparsity.levels import LEVELS
from comfy_sage2.sparsity.thresholds import choose, sampled_rows

from ..demo.captions import CaptionEncoder
from ..demo.metrics import psnr
from ..demo.model import TRAINED_FOLDER, DemoModel
from ..demo.sampler import decode, denoise, pixels, starting_noise
from ..demo.scenes import random_scene
from ..demo.wan_dit import WanDiT
from ..demo.wan_vae import WanVAE
from ..result_page import kernel_versions, page_head, show

_SIDE, _FRAMES = 256, 33
_DENSE_SHARE = 0.2
_UNSAMPLED = 1000  # added to a step's number: other rows than those by which blocks are chosen

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Design:
    """A way to leave key blocks out.

    Attributes:
        name: in words.
        block_tokens: of a block; 128 is computed in 8b, others exactly.
        bound: of each head's error; None where `share` or `deviations` decide, or nothing is left out.
        share: of each query block's key blocks, those with the highest pooled scores.
        deviations: of a query block's pooled scores, above which a block is computed.
    """

    name: str
    block_tokens: int = BLOCK_TOKENS
    bound: float | None = None
    share: float | None = None
    deviations: float | None = None

    @property
    def is_dense(self) -> bool:
        """Nothing is left out."""
        return self.bound is None and self.share is None and self.deviations is None


DESIGNS = (
    Design("dense 8b"),
    *(Design(f"{level}, {bound:g}", bound=bound) for level, bound in LEVELS.items()),
    *(Design(f"{level}, {bound:g}, blocks of 64", 64, bound) for level, bound in LEVELS.items()),
    Design("share 50 %, blocks of 64", 64, share=0.5),
    Design("Sol top 20 %, blocks of 64", 64, share=0.2),
    Design("Sol tau 1, blocks of 64", 64, deviations=1.0),
)


class SparseAttention:
    """The self-attention of one sampling of some captions, each with blocks of its own. `step` is set from outside.

    Attributes:
        computed: for each call that left blocks out, the share that it computed of each caption, (captions,).
        dense_calls: all others.
        errors: for each call that left blocks out, the relative L2 of each caption and head on rows that are not those
            by which blocks were chosen, (captions, H).
    """

    def __init__(self, design: Design, steps: int, captions: int = 1) -> None:
        self._design = design
        self._dense_steps = math.ceil(_DENSE_SHARE * steps)
        self._captions = captions
        self._choices = None if design.bound is None else BlockChoices(design.bound)
        self.step = 0
        self.computed: list[torch.Tensor] = []
        self.dense_calls = 0
        self.errors: list[torch.Tensor] = []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output of a layer in `step`: q, k, v (B, H, N, D), first of all captions, then of the empty one."""
        if self._design.is_dense or self.step < self._dense_steps:
            self.dense_calls += 1
            return _dense(self._design, q, k, v)
        active = self._active(layer, q, k, v)
        out = self._without_others(q, k, v, active)
        self.computed.append(self._of_captions(active.float().mean(dim=(1, 2, 3))).mean(dim=0))
        rows = sampled_rows(q.shape[2], self.step + _UNSAMPLED, q.device)
        exact = _exact(q[:, :, rows].float(), k, v)
        lost = (out[:, :, rows].float() - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
        self.errors.append(self._of_captions(lost).amax(dim=0))
        return out

    def _of_captions(self, of_batch: torch.Tensor) -> torch.Tensor:
        """(B, ...) as (B / captions, captions, ...)."""
        parts: torch.Tensor = of_batch.unflatten(0, (-1, self._captions))
        return parts

    def _active(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The active blocks of this call, bool (B, H, Tq, Tk)."""
        design = self._design
        if self._choices is None:
            return _by_rule(design, q, k)
        if design.block_tokens != BLOCK_TOKENS:
            return _by_bound(design, q, k, v, self.step)
        key = ChoiceKey.of(layer, q, k)
        mask = self._choices.block_mask(key, Moment(self.step), q, k, v, scale=q.shape[3] ** -0.5)
        assert isinstance(mask, BlockMask)
        return mask.to_dense()

    def _without_others(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        design = self._design
        if design.block_tokens == BLOCK_TOKENS:
            return attention(q, k, v, rotate="off", block_mask=BlockMask.from_dense(active))
        mask = _tokens_of(active, design.block_tokens)
        if design.deviations is None and design.share != 0.2:
            return _exact(q, k, v, mask)
        return _with_centroids(q, k, v, active, design.block_tokens)


def _dense(design: Design, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, rotate="off") if design.block_tokens == BLOCK_TOKENS else _exact(q, k, v)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention in float32, whatever the model computes in."""
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=attn_mask).to(q.dtype)


def _tokens_of(active: torch.Tensor, block_tokens: int) -> torch.Tensor:
    return active.repeat_interleave(block_tokens, dim=2).repeat_interleave(block_tokens, dim=3)


def _by_bound(design: Design, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: int) -> torch.Tensor:
    """The active blocks as the node chooses them, but of other blocks than the kernels', and in each step anew."""
    assert design.bound is not None
    tokens, scale = design.block_tokens, q.shape[3] ** -0.5
    with torch.autocast(q.device.type, enabled=False):
        queries, keys = (pool_tokens(x)[0] for x in (q, k))
        shares = (queries @ keys.mT * scale).softmax(dim=3)
        of_blocks = shares.unflatten(3, (-1, tokens // POOL_TOKENS)).sum(dim=4)
        scores = of_blocks.unflatten(2, (-1, tokens // POOL_TOKENS)).mean(dim=3)
    choice = choose(q, k, v, scores, design.bound, scale=scale, sample=step, block_tokens=tokens)
    active: torch.Tensor = scores > choice.thresholds[..., None, None]
    return active


def _pooled_scores(q: torch.Tensor, k: torch.Tensor, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled scores of the means of blocks (B, H, Tq, Tk), K centered; and their deviation (B, H, Tq, 1) as Sol's."""
    queries, keys = (x.float().unflatten(2, (-1, block_tokens)).mean(dim=3) for x in (q, k))
    keys = keys - keys.mean(dim=2, keepdim=True)
    with torch.autocast(q.device.type, enabled=False):
        scores = queries @ keys.mT * q.shape[3] ** -0.5
    variance = (queries.square() * keys.square().mean(dim=2, keepdim=True)).sum(dim=3, keepdim=True) / q.shape[3]
    return scores, (variance + 1e-6 * math.log(2) ** 2).sqrt()


def _by_rule(design: Design, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The active blocks by a share or deviations, with those beside the diagonal."""
    scores, deviation = _pooled_scores(q, k, design.block_tokens)
    if design.share is not None:
        count = max(1, round(design.share * scores.shape[3]))
        active = scores >= scores.topk(count, dim=3).values[..., -1:]
    else:
        assert design.deviations is not None
        active = scores > design.deviations * deviation
    place = torch.arange(scores.shape[3], device=q.device)
    return active | ((place[:, None] - place).abs() <= 1)


def _with_centroids(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor, block_tokens: int
) -> torch.Tensor:
    """Exact attention over the active blocks; every other one enters by its pooled score and the sum of its values."""
    with torch.autocast(q.device.type, enabled=False):
        return _mixed(q.float(), k.float(), v.float(), active, block_tokens).to(q.dtype)


def _mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor, block_tokens: int) -> torch.Tensor:
    scores, _ = _pooled_scores(q, k, block_tokens)
    centered = k - k.mean(dim=2, keepdim=True)
    exact = (q @ centered.mT * q.shape[3] ** -0.5).masked_fill(~_tokens_of(active, block_tokens), -math.inf)
    pooled = (scores + math.log(block_tokens)).masked_fill(active, -math.inf).repeat_interleave(block_tokens, dim=2)
    p = torch.cat([exact, pooled], dim=3).softmax(dim=3)
    out: torch.Tensor = p @ torch.cat([v, v.unflatten(2, (-1, block_tokens)).mean(dim=3)], dim=2)
    return out


@dataclass(frozen=True)
class Clip:
    """What came of one caption with one design, beside the video in full precision.

    Attributes:
        computed: share of the blocks in calls that left some out.
        blocks: in all calls of self-attention, dense ones too.
        psnr: in dB.
        error, worst: relative L2 on rows that were not sampled: mean over heads and calls; of the worst head, the mean
            over its calls.
    """

    computed: float
    blocks: float
    psnr: float
    error: float
    worst: float


class Studio:
    """The demo model on one device."""

    def __init__(self, model: DemoModel, device: torch.device, steps: int) -> None:
        self._dit, self._vae = WanDiT.load(model.dit).to(device), WanVAE.load(model.vae).to(device)
        self._encoder, self._steps = CaptionEncoder.load(model.captions), steps

    def videos(
        self, captions: Sequence[str], seeds: Sequence[int], attend: Attend, before_step: Callable[[int], None]
    ) -> list[torch.Tensor]:
        """Of each caption pixels (frames, height, width, 3) uint8; they are sampled in one batch."""
        for layer, (self_attention, _) in enumerate(self._dit.attentions()):

            def of_layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = layer) -> torch.Tensor:
                return attend(layer, q, k, v)

            self_attention.attend = of_layer
        noise = torch.cat([starting_noise(seed, width=_SIDE, height=_SIDE, frames=_FRAMES) for seed in seeds])
        latents = denoise(
            self._dit, self._encoder, captions, noise, steps=self._steps, before_step=before_step, in_float32=True
        )
        return [pixels(video) for video in decode(self._vae, latents)]

    def full(self, captions: Sequence[str], seeds: Sequence[int]) -> list[torch.Tensor]:
        """The videos in full precision."""
        return self.videos(captions, seeds, lambda _, q, k, v: _exact(q, k, v), lambda step: None)

    def clips(
        self, design: Design, captions: Sequence[str], seeds: Sequence[int], full: Sequence[torch.Tensor]
    ) -> list[Clip]:
        """Of each caption what its video with `design` is beside that of `full`."""
        sparse = SparseAttention(design, self._steps, len(captions))

        def before_step(step: int) -> None:
            sparse.step = step

        videos = self.videos(captions, seeds, sparse.attend, before_step)
        calls = len(sparse.computed)
        computed = torch.stack(sparse.computed).sum(dim=0).tolist() if calls else [0.0] * len(captions)
        errors = torch.stack(sparse.errors) if calls else torch.zeros(1, len(captions), 1)
        return [
            Clip(
                computed[number] / calls if calls else 1.0,
                (computed[number] + sparse.dense_calls) / (calls + sparse.dense_calls),
                psnr(video, full[number]),
                float(errors[:, number].mean()),
                float(errors[:, number].mean(dim=0).max()),
            )
            for number, video in enumerate(videos)
        ]


def rows(found: dict[str, list[Clip]]) -> Iterator[str]:
    """Markdown: a row for each design, means over the captions and the worst of them."""
    yield "| design | captions | blocks in sparse calls | in all calls | PSNR (dB) | worst | error | worst head |"
    yield "| --- " * 8 + "|"
    for name, clips in found.items():
        decibels = [clip.psnr for clip in clips]
        yield (
            f"| {name} | {len(clips)} | {mean(clip.computed for clip in clips):.1%} | "
            f"{mean(clip.blocks for clip in clips):.1%} | {mean(decibels):.1f} | {min(decibels):.1f} | "
            f"{mean(clip.error for clip in clips):.4f} | {max(clip.worst for clip in clips):.4f} |"
        )


def page(command: str, device: torch.device, steps: int, lines: Sequence[str]) -> str:
    """The measured part of the page of docs/results."""
    tokens = (_FRAMES + 3) // 4 * (_SIDE // 16) ** 2
    return "\n".join(
        [
            *page_head(
                "Sparse attention in whole videos",
                machine=machine.summary(device),
                kernels=f"{kernel_versions(device)}; in rows of blocks of 64 none, PyTorch",
                settings="the attention function in 8b, `rotate` off; `sparse` as each row says",
                command=command,
            ),
            f"{steps} steps, the first {_DENSE_SHARE:.0%} of them dense, {tokens:,} tokens; PSNR against the video in "
            "full precision; all but the attention is float32. *error*: relative L2 of heads on 64 rows that are not "
            "those by which blocks were chosen.",
            "",
            *lines,
        ]
    )


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=TRAINED_FOLDER, help="folder of the trained demo model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--captions", type=at_least_1, default=4)
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--steps", type=at_least_1, default=20)
    parser.add_argument("--batch", type=at_least_1, default=4, help="captions that are sampled at once")
    parser.add_argument("--seconds", type=at_least_1, default=100_000, help="begin no batch after this time")
    parser.add_argument("--designs", nargs="+", metavar="TEXT", help="only designs whose name has one of these texts")
    parser.add_argument(
        "--results", type=output_folder, metavar="FOLDER", help="write sparse-videos.md and .json there"
    )
    options = parser.parse_args(arguments)
    model = DemoModel(options.model, trained=True)
    for path in (model.dit, model.vae, model.captions):
        if not path.is_file():
            parser.error(f"argument --model: {path} is missing; name the folder of the trained demo model")
    designs = [one for one in DESIGNS if any(text in one.name for text in options.designs or [""])]
    rng, device, started = random.Random(options.seed), torch.device(options.device), time.monotonic()
    found: dict[str, list[Clip]] = {design.name: [] for design in designs}
    with torch.no_grad():
        studio = Studio(model, device, options.steps)
        for first in range(0, options.captions, options.batch):
            if time.monotonic() - started > options.seconds:
                break
            numbers = range(first, min(first + options.batch, options.captions))
            captions, seeds = [random_scene(rng).caption() for _ in numbers], [options.seed + n for n in numbers]
            full = studio.full(captions, seeds)
            for design in designs:
                found[design.name] += studio.clips(design, captions, seeds, full)
            print(f"{numbers.stop} of {options.captions} captions, {time.monotonic() - started:.0f} s", flush=True)
    command = " ".join(["python -m lab sparse", *arguments])
    text = page(command, device, options.steps, list(rows(found))) + "\n"
    show(text, "sparse-videos", options.results)
    if options.results is not None:
        clips = {name: [asdict(clip) for clip in made] for name, made in found.items()}
        (options.results / "sparse-videos.json").write_text(json.dumps(clips), encoding="utf-8")
    return 0
