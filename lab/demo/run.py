"""`python -m lab demo`: sampling the variants, comparing them, and writing what came out; see `arguments`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from comfy_sage2.doctor import verdicts
from comfy_sage2.metrics import Agreement
from tools.comfyui.server import NotStarted
from tools.progress import Activity, ProgressBar

from ..animation import write_animation
from ..baselines import BASELINES
from ..contact_sheet import SheetRow, contact_sheet, spread
from .arguments import parse
from .comfyui_host import ComfyHost, shipped_job
from .finished import FinishedClips, file_name, fingerprint
from .job import FPS, FULL_PRECISION, MODES, PURPOSES, Clip, Host, Job
from .metrics import psnr, ssim
from .model import DemoModel, demo_model
from .videos import write_mp4

# Random weights draw noise whatever the size, so they get the smallest job that exercises everything.
_RANDOM_MODEL_SIZE: dict[str, Any] = {"width": 128, "height": 128, "frames": 9, "steps": 4}

# A host's first steps take seconds longer, which would all be counted against the first variant. A CPU learns nothing
# about a size, and there a few frames do.
_WARM_UP_STEPS, _WARM_UP_FRAMES = 4, 5

_BASELINES_NOTE = (
    "On a model this small the baselines need not come in the paper's order: `python -m lab eval` compares them call "
    "by call, on this model's and on other inputs."
)


def _without_kernel() -> list[str]:
    """The modes that no accelerated backend serves on the first device."""
    found = verdicts()
    return [verdict.mode for verdict in found if verdict.device == found[0].device and not verdict.chosen]


def _job(model: DemoModel, without_kernel: Collection[str]) -> Job:
    job = shipped_job(backend="reference" if set(without_kernel) >= set(MODES) else None)
    return job if model.trained else replace(job, **_RANDOM_MODEL_SIZE)


def sample(host: Host, job: Job, variants: Sequence[str], without_kernel: Collection[str]) -> Iterator[Clip]:
    """A clip for each variant.

    For the modes `without_kernel` the reference computes the same numbers, slower than plain attention.
    """
    first = replace(job, steps=min(job.steps, _WARM_UP_STEPS), seed=job.seed + 1)
    if not torch.cuda.is_available():
        first = replace(first, frames=min(job.frames, _WARM_UP_FRAMES))
    with ProgressBar("warming up") as progress:
        host.sample(first, FULL_PRECISION, progress)
    for variant in variants:
        with ProgressBar(f"sampling {variant}") as progress:
            chosen = replace(job, backend="reference") if variant in without_kernel else job
            clip = host.sample(chosen, variant, progress)
        yield clip


def table(clips: Sequence[Clip]) -> str:
    """Each clip against the first one, as a Markdown table."""
    lines = [
        "| attention | PSNR (dB) | SSIM | cosine of latents | time (s) | what it is |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    reference = clips[0]
    with ProgressBar("comparing") as progress:
        for number, clip in enumerate(clips):
            progress(number / len(clips))
            distances = f"{psnr(clip.frames, reference.frames):.2f} | {ssim(clip.frames, reference.frames):.4f}"
            likeness = f"{Agreement.of(clip.latent, reference.latent).cosine:.5f} | {clip.seconds:.2f}"
            lines.append(f"| {clip.variant} | {distances} | {likeness} | {PURPOSES[clip.variant]} |")
    return "\n".join(lines)


def write_results(folder: Path, clips: Sequence[Clip], heading: Sequence[str]) -> str:
    """Write everything and return the text of the table."""
    with ProgressBar("writing videos") as progress:
        for number, clip in enumerate(clips):
            progress(number / len(clips))
            write_mp4(folder / f"{file_name(clip.variant)}.mp4", clip.frames)
        contact_sheet([SheetRow(clip.variant, spread(clip.frames)) for clip in clips]).save(
            folder / "contact_sheet.png"
        )
        modes = [SheetRow(clip.variant, list(clip.frames)) for clip in clips if clip.variant not in BASELINES]
        write_animation(folder / "comparison.webp", modes, FPS)
    notes = [f"{clip.variant}:\n{clip.note}" for clip in clips]
    if any(clip.variant in BASELINES for clip in clips):
        notes.insert(0, _BASELINES_NOTE)
    text = "\n\n".join(["\n".join(heading), table(clips), *notes])
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
    return text


@contextmanager
def _host(options: argparse.Namespace, model: DemoModel) -> Iterator[Host]:
    if options.comfyui is None:
        with Activity("loading diffusers"):
            from .diffusers_host import DiffusersHost  # only this host needs diffusers

            host = DiffusersHost(model)
        yield host
        return
    with ComfyHost(options.comfyui, options.comfyui_python, model) as comfyui:
        yield comfyui


def _run(options: argparse.Namespace, scratch: Path) -> tuple[list[Clip], list[str]]:
    """The clips, sampled where that is needed, and what the results are headed by."""
    with Activity("looking at this machine"):
        model = demo_model(scratch)
        without_kernel = _without_kernel()
        job = _job(model, without_kernel)
        name, sources = "diffusers (embedded host)", []
        if options.comfyui is not None:
            name, sources = f"ComfyUI at {options.comfyui}", [options.comfyui / "comfy"]
        finished = FinishedClips(
            options.output / "finished", fingerprint(job, model, name, options.comfyui_python, sources)
        )
    weights = "the trained demo model" if model.trained else "random weights: the pictures are noise"
    backend = "the fastest kernel of this GPU" if job.backend is None else f"{job.backend}, as no kernel can run here"
    if job.backend is None and without_kernel:
        backend += f"; the reference for {' and '.join(without_kernel)}, which it lacks"
    heading = [f"host: {name}", f"model: {weights}", f"attention backend: {backend}"]
    print("\n".join(heading), flush=True)

    variants = [FULL_PRECISION, *MODES, *(BASELINES if options.baselines else ())]
    missing = [variant for variant in variants if options.again or finished.get(variant) is None]
    if missing:
        with _host(options, model) as host:
            for clip in sample(host, job, missing, without_kernel):
                finished.put(clip)
    if len(missing) < len(variants):
        heading.append(f"used again from an earlier run: {', '.join(v for v in variants if v not in missing)}")
        print(heading[-1], flush=True)
    found = [finished.get(variant) for variant in variants]
    return [clip for clip in found if clip is not None], heading


def main(arguments: list[str]) -> int:
    """Run the demo; 0 when all videos were written, 1 when ComfyUI does not start."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            clips, heading = _run(options, Path(scratch))
    except NotStarted as error:
        print(error, file=sys.stderr)
        return 1
    print("\n" + write_results(options.output, clips, heading))
    print(f"\nvideos, comparison.webp, contact_sheet.png and results.md are in {options.output}")
    return 0
