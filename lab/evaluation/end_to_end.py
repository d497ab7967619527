"""Whole videos: every attention samples the same captions from the same noise, and is compared with full precision."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from lab.progress import ProgressBar

from ..contact_sheet import SheetRow, contact_sheet
from ..demo.captions import CaptionEncoder
from ..demo.model import DemoModel
from ..demo.sampler import decode, denoise, pixels, starting_noise
from ..demo.scenes import Scene, random_scene
from ..demo.wan_dit import AttentionFunction, WanDiT
from ..demo.wan_vae import WanVAE
from .caption_classifier import CLASSIFIER_FILE, CaptionClassifier, shrunk, word_accuracy
from .variants import FULL_PRECISION, use_attention, variants
from .video_quality import FeatureDistance, VideoQuality, compare

_SHEET_COLUMNS = 6
_MOMENT = 0.6  # which frame of a clip is shown where there is room for one, as a share of its length
_AT_ONCE = {"cuda": 16, "cpu": 1}  # captions that are sampled together


@dataclass(frozen=True)
class EndToEndJob:
    """captions: how many, drawn with ``seed`` from the demo model's grammar; number n starts from noise seed + n.

    rows: names of the attentions beside full precision, in this order; None: all.
    """

    captions: int
    seed: int
    steps: int
    side: int
    frames: int
    kernel: str | None = None
    rows: tuple[str, ...] | None = None

    def attentions(self) -> dict[str, AttentionFunction]:
        """Name -> attention, full precision first; ValueError for a row that there is not."""
        found = variants(self.kernel)
        rows = tuple(found) if self.rows is None else (FULL_PRECISION, *self.rows)
        if unknown := [name for name in rows if name not in found]:
            raise ValueError(f"there is no row {unknown[0]!r}; the rows are {', '.join(found)}")
        return {name: found[name] for name in rows}

    def scenes(self) -> list[Scene]:
        """What the captions say."""
        rng = random.Random(self.seed)
        return [random_scene(rng) for _ in range(self.captions)]


@dataclass(frozen=True)
class RatedClip:
    """What is kept of one video: its quality, what the classifier read (1, 44), frames (height, width, 3) uint8."""

    quality: VideoQuality
    logits: torch.Tensor
    shown: Sequence[torch.Tensor]


class Studio:
    """The demo model and its judges on one device."""

    def __init__(self, model: DemoModel, job: EndToEndJob, device: torch.device) -> None:
        self.job, self.device = job, device
        self.dit = WanDiT.load(model.dit).to(device)
        self.vae = WanVAE.load(model.vae).to(device)
        self.encoder = CaptionEncoder.load(model.captions)
        self.classifier = CaptionClassifier.load(model.folder / CLASSIFIER_FILE).to(device)
        self.distance = FeatureDistance(self.vae)
        self.attentions = job.attentions()

    def clips(self, numbers: range) -> dict[str, list[RatedClip]]:
        """Sample the captions ``numbers`` with every attention: its name -> a clip for each caption."""
        job, scenes = self.job, self.job.scenes()
        captions = [scenes[number].caption() for number in numbers]
        size = {"width": job.side, "height": job.side, "frames": job.frames}
        noise = torch.cat([starting_noise(job.seed + number, **size) for number in numbers])
        found: dict[str, list[RatedClip]] = {}
        for name, attend in self.attentions.items():
            use_attention(self.dit, attend)
            latents = denoise(self.dit, self.encoder, captions, noise, steps=job.steps).cpu()
            videos = decode(self.vae, latents.to(self.device))
            if name == FULL_PRECISION:
                full_latents, full_videos = latents, videos
                full_features = [self.distance.features(video.to(self.device)) for video in videos]
            found[name] = [
                self._clip(*each)
                for each in zip(videos, latents, full_videos, full_latents, full_features, strict=True)
            ]
        return found

    @torch.no_grad()
    def _clip(
        self,
        video: torch.Tensor,
        latent: torch.Tensor,
        full_video: torch.Tensor,
        full_latent: torch.Tensor,
        full_features: list[torch.Tensor],
    ) -> RatedClip:
        video = video.to(self.device)
        frames = pixels(video)
        quality = compare(
            frames,
            pixels(full_video.to(self.device)),
            self.distance.between(self.distance.features(video), full_features),
            latent,
            full_latent,
        )
        logits = self.classifier(shrunk(video[None])).cpu()
        return RatedClip(quality, logits, [frames[moment].cpu() for moment in _moments(self.job.captions, len(frames))])


def _moments(captions: int, frames: int) -> list[int]:
    """Which frames of a clip are shown: one, or as many of few captions as fit beside each other, evenly spread."""
    each = min(_SHEET_COLUMNS // captions, frames)
    if each < 2:
        return [round(_MOMENT * (frames - 1))]
    return [round(part * (frames - 1) / (each - 1)) for part in range(each)]


_studio: Studio | None = None  # of this worker process


def _open_studio(model: DemoModel, job: EndToEndJob) -> None:
    global _studio
    # The reference's blocks are small: a caption on each core is several times quicker than all cores on one caption.
    torch.set_num_threads(1)
    _studio = Studio(model, job, torch.device("cpu"))


def _clips_in_worker(numbers: range) -> dict[str, list[RatedClip]]:
    assert _studio is not None
    return _studio.clips(numbers)


def _rounds(
    model: DemoModel, job: EndToEndJob, device: torch.device, workers: int
) -> Iterator[dict[str, list[RatedClip]]]:
    """The captions in order, a few at a time; on a CPU in as many processes as asked for."""
    step = _AT_ONCE[device.type]
    parts = [range(first, min(first + step, job.captions)) for first in range(0, job.captions, step)]
    if device.type == "cuda":
        yield from map(Studio(model, job, device).clips, parts)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _open_studio, (model, job)) as pool:
        yield from pool.map(_clips_in_worker, parts)


def run_end_to_end(model: DemoModel, job: EndToEndJob, device: torch.device, workers: int, output: Path) -> str:
    """Sample and compare; writes end_to_end.json and end_to_end.png to ``output`` and returns the table as markdown.

    The files are written anew after every few captions, so that a run that is stopped leaves what it had.
    """
    clips: dict[str, list[RatedClip]] = {}
    text = ""
    with ProgressBar("captions") as progress:
        for found in _rounds(model, job, device, workers):
            for name, more in found.items():
                clips.setdefault(name, []).extend(more)
            done = len(clips[FULL_PRECISION])
            progress(done / job.captions)
            text = _write(clips, job, output)
    return text


def _write(clips: dict[str, list[RatedClip]], job: EndToEndJob, output: Path) -> str:
    scenes = job.scenes()[: len(clips[FULL_PRECISION])]
    lines = [
        f"{len(scenes)} captions and seeds, {job.steps} steps, {job.frames} frames of {job.side} x {job.side}; "
        "self- and cross-attention of every layer and step.",
        "",
        "| Attention | Caption accuracy | PSNR (dB) | worst PSNR | SSIM | VAE distance | latent cosine | Flicker |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    results = {}
    for name, made in clips.items():
        accuracy = word_accuracy(torch.cat([clip.logits for clip in made]), scenes)
        qualities = [clip.quality for clip in made]
        results[name] = {"caption_accuracy": accuracy, "by_caption": [_as_json(quality) for quality in qualities]}
        lines.append(_line(name, accuracy["caption"], qualities))
    data = {"job": asdict(job), "captions": [scene.caption() for scene in scenes], "results": results}
    (output / "end_to_end.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    rows = {name: [frame for clip in made for frame in clip.shown] for name, made in clips.items()}
    sheet = contact_sheet([SheetRow(name, frames[:_SHEET_COLUMNS]) for name, frames in rows.items()])
    sheet.save(output / "end_to_end.png")
    return "\n".join(lines)


def _as_json(quality: VideoQuality) -> dict[str, float | None]:
    """JSON has no infinity, which the PSNR of equal videos is."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(quality).items()}


def _line(name: str, accuracy: float, each: list[VideoQuality]) -> str:
    mean = VideoQuality.mean(each)
    beside = [""] * 5
    if name != FULL_PRECISION:
        beside = [
            f"{mean.psnr:.2f}",
            f"{min(quality.psnr for quality in each):.2f}",
            f"{mean.ssim:.4f}",
            f"{mean.vae_distance:.5f}",
            f"{mean.latent_cosine:.5f}",
        ]
    return f"| {name} | {accuracy:.1%} | " + " | ".join(beside) + f" | {mean.flicker:.2f} |"
