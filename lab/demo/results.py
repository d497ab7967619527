"""What the demo writes: videos, pictures, and a page that says what was sampled, on what, and how close each came."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from comfy_sage2 import __version__, machine
from comfy_sage2.metrics import Agreement
from lab.progress import ProgressBar

from ..animation import write_animation
from ..baselines import BASELINES
from ..contact_sheet import SheetRow, contact_sheet, spread
from .finished import file_name
from .job import FPS, FULL_PRECISION, MODES, PURPOSES, Clip, Job
from .metrics import psnr, ssim
from .videos import write_mp4

PAGE = "results.md"
_HOW_TO_READ = (
    "PSNR compares the pixels with those of the video in full precision, in decibels: more is closer. At 35 dB and "
    "more the eye sees hardly a difference, below 25 dB things have other outlines. SSIM compares structures, and the "
    "cosine what the model made before it was decoded; 1 is identical."
)
_SLOW = (
    "No kernel ran on this machine. The reference computed the same numbers in PyTorch, slowly, so the table has no "
    "times: they would say nothing about the speed of the kernels."
)
_BASELINES_NOTE = (
    "On a model this small the baselines need not come in the paper's order: `python -m lab eval` compares them call "
    "by call, on this model's and on other inputs."
)


@dataclass(frozen=True)
class Distances:
    """How far a clip is from the one in full precision."""

    psnr: float
    ssim: float
    cosine: float

    @classmethod
    def of(cls, clip: Clip, reference: Clip) -> Distances:
        """Of clips of one size."""
        return cls(
            psnr(clip.frames, reference.frames),
            ssim(clip.frames, reference.frames),
            Agreement.of(clip.latent, reference.latent).cosine,
        )


def about(job: Job, host: str, model: str) -> list[str]:
    """What is sampled and on what, as a list in Markdown. host, model: in words."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [
        f'- Video: "{job.caption}", {job.width} × {job.height} pixels, {job.frames} frames, {job.steps} steps, '
        f"guidance {job.guidance:g}, seed {job.seed}",
        f"- Model: {model}",
        f"- Host: {host}",
        f"- Machine: {machine.summary(device)}, Python {machine.python()}; comfy_sage2 {__version__}",
    ]


def table(clips: Sequence[Clip], distances: Sequence[Distances], without_kernel: Collection[str]) -> str:
    """Each clip against the first one, as a Markdown table; times of the modes `without_kernel` are left out."""
    has_times = not set(MODES) <= set(without_kernel)
    columns = [
        "attention",
        "PSNR (dB)",
        "SSIM",
        "cosine of latents",
        *(["time (s)"] if has_times else []),
        "what it is",
    ]
    rows = [columns, ["---"] * len(columns)]
    for clip, found in zip(clips, distances, strict=True):
        closeness = [f"{found.psnr:.2f}", f"{found.ssim:.4f}", f"{found.cosine:.5f}"]
        if clip is clips[0]:
            closeness = ["–"] * len(closeness)
        timed = clip.variant not in {*without_kernel, *BASELINES}
        seconds = [f"{clip.seconds:.2f}" if timed else "–"] if has_times else []
        rows.append([clip.variant, *closeness, *seconds, PURPOSES[clip.variant]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_results(
    folder: Path, clips: Sequence[Clip], heading: Sequence[str], without_kernel: Collection[str]
) -> tuple[str, list[Path]]:
    """Write everything; the text of the page, and the files. The first clip is the one in full precision."""
    with ProgressBar("comparing") as progress:
        distances = []
        for number, clip in enumerate(clips):
            progress(number / len(clips))
            distances.append(Distances.of(clip, clips[0]))
    paths = [folder / f"{file_name(clip.variant)}.mp4" for clip in clips]
    with ProgressBar("writing videos") as progress:
        for number, (path, clip) in enumerate(zip(paths, clips, strict=True)):
            progress(number / len(clips))
            write_mp4(path, clip.frames)
        labels = [_label(clip, found) for clip, found in zip(clips, distances, strict=True)]
        rows = [SheetRow(label, spread(clip.frames)) for label, clip in zip(labels, clips, strict=True)]
        contact_sheet(rows).save(folder / "contact_sheet.png")
        modes = [
            SheetRow(label, list(clip.frames))
            for label, clip in zip(labels, clips, strict=True)
            if clip.variant not in BASELINES
        ]
        write_animation(folder / "comparison.webp", modes, FPS)
    notes = [_SLOW] if set(MODES) <= set(without_kernel) else []
    if any(clip.variant in BASELINES for clip in clips):
        notes.append(_BASELINES_NOTE)
    reports = [f"{clip.variant}:\n{clip.note}" for clip in clips]
    page = [
        "# One video with several attentions", "\n".join(heading), table(clips, distances, without_kernel),
        _HOW_TO_READ, *notes, "## What each attention did", *reports,
    ]  # fmt: skip
    text = "\n\n".join(page)
    (folder / PAGE).write_text(text + "\n", encoding="utf-8")
    return text, [*paths, folder / "contact_sheet.png", folder / "comparison.webp", folder / PAGE]


def _label(clip: Clip, found: Distances) -> str:
    return clip.variant if clip.variant == FULL_PRECISION else f"{clip.variant}: {found.psnr:.1f} dB"
