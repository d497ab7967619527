"""`python -m lab videos`: whole videos with every attention, from the same captions and noise as in full precision.

    python -m lab videos --results docs/results  # videos.md and videos.jpg

Rows are the modes as a new node has them and without rotation, sparse attention, the baselines of the paper by
reference numerics, and on a GPU the attentions of other packages and the builds that `--build` names, as for
`lab bench`. Each gets q, k and v in bfloat16, as a model in bfloat16 passes them; all but the attention is float32.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import mean
from typing import Any

import torch
from torch.nn import functional as F

from comfy_sage2.attention import attention
from comfy_sage2.autotune.auto_mode import auto_mode
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AUTO, MODES, AttentionOptions
from comfy_sage2.sparsity.call_blocks import add_tail_
from comfy_sage2.sparsity.choices import BlockChoices, ChoiceKey, Moment, values
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import LEVELS, Level
from comfy_sage2.timing.measure import ensure_timed

from ..arguments import add_device, at_least_1, parser_of, shown
from ..baselines import BASELINES
from ..bench import ours as kernels
from ..bench import peers
from ..bench.candidates import BenchmarkCandidate, Candidates, PeerMissing
from ..demo.job import CLASSIFIER_FILE, FOLDER, Job
from ..demo.metrics import psnr, ssim
from ..demo.model import Attend, DemoModel, ReplacedAttention, pixels, starting_noise
from ..demo.scenes import Scene, random_scene
from ..pictures import contact_sheet
from ..progress import ProgressBar
from ..result_page import page_head, show, table, write
from .caption_classifier import CaptionClassifier, shrunk, word_accuracy

FULL_PRECISION = "full precision"
_PEERS = ("comfy-kitchen", "sageattention", "flash-attention-3")
_SHOWN_CAPTIONS = 6
_SHOWN_MOMENT = 0.6  # of a clip's length
_AT_ONCE = 8  # captions that are sampled together
_DENSE_SHARE = 0.2  # of the steps of a sparse sampling, as in a new node


def baseline(name: str) -> Attend:
    """An attention that the paper compares with."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return BASELINES[name](q, k, v)[0]

    return attend


def of_candidate(candidate: BenchmarkCandidate) -> Attend:
    """Another package's attention, or that of a build."""
    return lambda q, k, v: candidate.attend(q.contiguous(), k.contiguous(), v.contiguous())


class SparseAttention:
    """Self-attention with the key blocks that the node chooses; call `begin_step` before each step.

    The first steps are dense, and so is cross-attention. Blocks of 128 tokens are half a frame of these short videos:
    a large model needs fewer of them for the same bound.
    """

    def __init__(self, ours: Callable[..., tuple[torch.Tensor, torch.Tensor]], level: Level) -> None:
        """ours: returns the LSE too."""
        self._ours, self._level = ours, level
        self._step = self._layer = 0

    def begin_step(self, step: int, steps: int) -> None:
        """Begin a step; step 0 begins a sampling."""
        if step == 0:
            self._choices = BlockChoices(self._level)
        self._step, self._layer, self._is_dense = step, 0, step < _DENSE_SHARE * steps

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output of a call."""
        if self._is_dense or q.shape != k.shape:
            return self._ours(q, k, v)[0]
        scale, key = q.shape[3] ** -0.5, ChoiceKey(self._layer, tuple(q.shape), k.shape[2], q.device)
        self._layer += 1
        blocks = self._choices.blocks(key, Moment(self._step), Inputs(q, k, v, scale))
        assert blocks is not None
        out, lse = self._ours(q, k, v, block_mask=blocks.mask)
        add_tail_(blocks, q, k, v, out, lse, "BHND", scale)
        return out

    def computed_share(self) -> float:
        """The share of the blocks that the sparse calls of the last sampling computed."""
        computed = [figure for figures in self._choices.figures.values() for figure in figures.computed]
        return mean(chain.from_iterable(values(computed)))


def attentions(device: torch.device) -> dict[str, Attend]:
    """Row -> attention, full precision first; on a CPU the reference computes the modes. Without other packages."""
    ours = partial(attention, backend=None if device.type == "cuda" else "reference", return_lse=False)
    rows: dict[str, Attend] = {FULL_PRECISION: F.scaled_dot_product_attention}
    rows[AUTO] = partial(ours, mode=AUTO)
    for mode in MODES:
        rows[mode] = partial(ours, mode=mode)
        rows[f"{mode}, rotate off"] = partial(ours, mode=mode, rotate="off")
    for name, level in LEVELS.items():
        rows[f"8b, sparse {name}"] = SparseAttention(partial(_with_lse, ours), level)
    return rows | {name: baseline(name) for name in BASELINES}


def split_able(
    candidates: Iterable[BenchmarkCandidate], device: torch.device
) -> tuple[dict[str, Attend], dict[str, str]]:
    """Row -> attention of those that compute a self- and a cross-attention here; row -> reason of the rest."""
    able, failures = dict[str, Attend](), dict[str, str]()
    q, text = (torch.randn(1, 2, tokens, 64, dtype=torch.bfloat16, device=device) for tokens in (576, 24))
    for candidate in candidates:
        attend = of_candidate(candidate)
        try:
            is_finite = all(bool(attend(q, k, k).isfinite().all()) for k in (q, text))
        except (RuntimeError, ValueError, TypeError, PeerMissing) as error:
            failures[candidate.name] = " ".join(str(error).split())
        else:
            if is_finite:
                able[candidate.name] = attend
            else:
                failures[candidate.name] = "it returns NaN or infinity"
    return able, failures


def _with_lse(
    ours: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = ours(q, k, v, mode="8b", return_lse=True, **options)
    return out, lse


def _in_bfloat16(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype)


@dataclass
class Row:
    """The results of one attention, caption by caption, compared with full precision."""

    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    cosine: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # what the classifier read, (1, 44)
    shown: list[torch.Tensor] = field(default_factory=list)  # a frame (height, width, 3) uint8 of the first captions

    def cells(self, scenes: Sequence[Scene], is_full: bool) -> list[str]:
        """Caption accuracy, PSNR and its worst, SSIM, cosine of the latents."""
        accuracy = f"{word_accuracy(torch.cat(self.logits), scenes)['caption']:.1%}"
        if is_full:
            return [accuracy, "", "", "", ""]
        decibels = [f"{mean(self.psnr):.2f}", f"{min(self.psnr):.2f}"]
        return [accuracy, *decibels, f"{mean(self.ssim):.4f}", f"{mean(self.cosine):.5f}"]


class Studio:
    """The demo model and the caption classifier on one device."""

    def __init__(self, device: torch.device, job: Job) -> None:
        self._model, self._job = DemoModel(device), job
        self._classifier = CaptionClassifier.load(FOLDER / CLASSIFIER_FILE).to(device)

    @torch.no_grad()
    def sample(
        self, scenes: Sequence[Scene], seeds: Sequence[int], rows: Mapping[str, Attend], results: dict[str, Row]
    ) -> None:
        """Sample the captions with every attention, and add the results to `results`."""
        job, captions = self._job, [scene.caption() for scene in scenes]
        size = {"width": job.width, "height": job.height, "frames": job.frames}
        noise = torch.cat([starting_noise(seed, **size) for seed in seeds])
        full_latents: list[torch.Tensor] = []
        full_frames: list[torch.Tensor] = []
        for name, attend in rows.items():
            begin_step = attend.begin_step if isinstance(attend, SparseAttention) else lambda step, steps: None
            with ReplacedAttention(partial(_in_bfloat16, attend)):
                latents = self._model.denoise(
                    captions, noise, steps=job.steps, before_step=partial(begin_step, steps=job.steps)
                )
            row = results.setdefault(name, Row())
            for number, latent in enumerate(latents.cpu()):
                video = self._model.decode(latent)
                frames = pixels(video).cpu()
                row.logits.append(self._classifier(shrunk(video[None])).cpu())
                row.shown.append(frames[round(_SHOWN_MOMENT * (len(frames) - 1))])
                if name == FULL_PRECISION:
                    full_latents.append(latent)
                    full_frames.append(frames)
                row.psnr.append(psnr(frames, full_frames[number]))
                row.ssim.append(ssim(frames, full_frames[number]))
                row.cosine.append(Agreement.of(latent, full_latents[number]).cosine)


def run(
    device: torch.device,
    job: Job,
    captions: int,
    rows: Mapping[str, Attend],
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[list[Scene], dict[str, Row]]:
    """The scenes, and the results of each row. The job's seed draws the captions; caption n has noise of seed + n."""
    rng, studio, results = random.Random(job.seed), Studio(device, job), dict[str, Row]()
    scenes = [random_scene(rng) for _ in range(captions)]
    for first in range(0, captions, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, captions))
        studio.sample(scenes[first : numbers.stop], [job.seed + number for number in numbers], rows, results)
        progress(numbers.stop / captions)
    return scenes, results


def body(job: Job, scenes: Sequence[Scene], results: Mapping[str, Row]) -> list[str]:
    """The page below its head."""
    return [
        f"{len(scenes)} captions, each with noise of its own that is the same for all attentions; {job.steps} steps, "
        f"{job.frames} frames of {job.width} × {job.height}; self- and cross-attention of every layer and step. "
        "Distances are to the same video in full precision. Caption accuracy: the share of a caption's words that a "
        "classifier finds in the video.",
        "",
        *table(
            ["attention", "caption accuracy", "PSNR (dB)", "worst PSNR", "SSIM", "latent cosine"],
            ([name, *row.cells(scenes, name == FULL_PRECISION)] for name, row in results.items()),
        ),
        "",
        "![A row for each attention, a column for each of the first captions](videos.jpg)",
    ]


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = parser_of("videos", __doc__, "videos.md and videos.jpg")
    add_device(parser)
    parser.add_argument("--captions", type=at_least_1, default=32)
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows whose name has one of these texts")
    parser.add_argument(
        "--build", action="append", type=kernels.Build.parse, default=[], metavar="NAME=FOLDER", help="may be repeated"
    )
    options = parser.parse_args(arguments)
    device, job = options.device, Job(frames=33, steps=20, seed=0)
    packages = peers.find(_PEERS) if device.type == "cuda" else Candidates()
    builds = chain.from_iterable(kernels.of_build(build.name, build.load(), rotate="auto") for build in options.build)
    able, failures = split_able([*packages.able, *builds], device)
    every = attentions(device) | able
    for text in options.rows or []:
        if not any(text in name for name in every):
            parser.error(f"argument --rows: no row has {text!r} in its name, only {', '.join(every)}")
    chosen = [name for name in every if any(text in name for text in options.rows or [""])]
    rows = {name: every[name] for name in every if name == FULL_PRECISION or name in chosen}
    ensure_timed(device)  # from which "auto" chooses
    with ProgressBar("captions") as progress:
        scenes, results = run(device, job, options.captions, rows, progress)
    lines = page_head(
        "Whole videos of the demo model",
        device,
        settings="the attention function; `rotate` on auto unless a row says otherwise",
        command=shlex.join(["python", "-m", "lab", "videos", *shown(arguments)]),
    )
    lines += body(job, scenes, results)
    left_out = packages.missing | failures
    if left_out:
        lines += ["", *(f"- {name} is not in the table: {reason}" for name, reason in left_out.items())]
    lines += ["", f"*auto* is {auto_mode(AttentionOptions(AUTO), device, torch.bfloat16, 128).reason}."]
    write(lines, "videos", options.results)
    if options.results is not None:
        sheet = contact_sheet({name: row.shown[:_SHOWN_CAPTIONS] for name, row in results.items()})
        sheet.save(options.results / "videos.jpg", quality=85)
    show(lines)
    return 0
