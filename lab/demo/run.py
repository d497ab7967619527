"""`python -m lab demo`: one caption in full precision, 8b, 4b and the paper's baselines, compared.

Writes an mp4 for each, a contact sheet, a table and what the attention did to the output folder. The model is small: it
shows how close each comes to full precision, and says nothing about the speed of a real one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from comfy_sage2.doctor import verdicts
from comfy_sage2.metrics import Agreement

from .comfyui_host import ComfyHost, reason_too_old, shipped_job
from .job import FULL_PRECISION, VARIANTS, Clip, Host, Job
from .metrics import psnr, ssim
from .model import DemoModel, demo_model
from .progress import ProgressBar
from .videos import contact_sheet, write_mp4

# Random weights draw noise whatever the size, so they get the smallest job that exercises everything.
_RANDOM_MODEL_SIZE: dict[str, Any] = {"width": 128, "height": 128, "frames": 9, "steps": 4}

# A host's first steps take seconds longer, which would all be counted against the first variant.
_WARM_UP_STEPS = 4


def _accelerated() -> bool:
    """Whether an accelerated backend serves both modes on the first device."""
    found = verdicts()
    return all(verdict.chosen for verdict in found if verdict.device == found[0].device)


def _job(model: DemoModel) -> Job:
    # Without a kernel the reference computes the same numbers, slower than plain attention.
    job = shipped_job(backend=None if _accelerated() else "reference")
    return job if model.trained else replace(job, **_RANDOM_MODEL_SIZE)


def sample_all(host: Host, job: Job) -> list[Clip]:
    """A clip for each variant, the full-precision one first."""
    with ProgressBar("warming up") as progress:
        host.sample(replace(job, steps=min(job.steps, _WARM_UP_STEPS), seed=job.seed + 1), FULL_PRECISION, progress)
    clips = []
    for variant in VARIANTS:
        with ProgressBar(f"sampling {variant}") as progress:
            clips.append(host.sample(job, variant, progress))
    return clips


def table(clips: list[Clip]) -> str:
    """Each clip against the first one, as a Markdown table."""
    lines = ["| attention | PSNR (dB) | SSIM | cosine of latents | time (s) |", "| --- | --- | --- | --- | --- |"]
    reference = clips[0]
    for clip in clips:
        distances = f"{psnr(clip.frames, reference.frames):.2f} | {ssim(clip.frames, reference.frames):.4f}"
        likeness = Agreement.of(clip.latent, reference.latent).cosine
        lines.append(f"| {clip.variant} | {distances} | {likeness:.5f} | {clip.seconds:.2f} |")
    return "\n".join(lines)


def write_results(folder: Path, clips: list[Clip], heading: list[str]) -> str:
    """Write everything and return the text of the table."""
    for clip in clips:
        write_mp4(folder / f"{clip.variant.replace(' ', '_')}.mp4", clip.frames)
    contact_sheet(clips).save(folder / "contact_sheet.png")
    notes = [f"{clip.variant}:\n{clip.note}" for clip in clips]
    text = "\n\n".join(["\n".join(heading), table(clips), *notes])
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the results")
    parser.add_argument("--comfyui", type=Path, help="folder of a ComfyUI; without it, diffusers is the host")
    parser.add_argument(
        "--comfyui-python", type=Path, default=Path(sys.executable), help="Python with its requirements"
    )
    return parser


@contextmanager
def _host(arguments: argparse.Namespace, model: DemoModel) -> Iterator[Host]:
    if arguments.comfyui is None:
        from .diffusers_host import DiffusersHost  # only this host needs diffusers

        yield DiffusersHost(model)
        return
    reason = reason_too_old(arguments.comfyui)
    if reason is not None:
        raise SystemExit(reason)
    with ComfyHost(arguments.comfyui, arguments.comfyui_python, model) as host:
        yield host


def main(arguments: list[str]) -> int:
    """Run the demo; 0 when all videos were written."""
    options = _parser().parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = demo_model(Path(scratch))
        job = _job(model)
        with _host(options, model) as host:
            weights = "the trained demo model" if model.trained else "random weights: the pictures are noise"
            backend = job.backend or "the fastest kernel of this GPU"
            heading = [f"host: {host.name}", f"model: {weights}", f"attention backend: {backend}"]
            print("\n".join(heading))
            clips = sample_all(host, job)
    print("\n" + write_results(options.output, clips, heading))
    print(f"\nvideos, contact_sheet.png and results.md are in {options.output}")
    return 0
