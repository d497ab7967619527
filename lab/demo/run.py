"""`python -m lab demo`: sampling the variants, comparing them, and writing what came out; see `arguments`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from comfy_sage2.doctor import verdicts
from lab.progress import Activity, ProgressBar
from tools.comfyui.folders import comfyui_version
from tools.comfyui.server import NotStarted

from ..baselines import BASELINES
from .arguments import parse
from .comfyui_host import ComfyHost, shipped_job
from .finished import FinishedClips, FinishedResults, fingerprint
from .job import FULL_PRECISION, MODES, Clip, Host, Job
from .model import DemoModel, demo_model
from .results import PAGE, about, write_results

# Random weights draw noise whatever the size, so they get the smallest job that exercises everything.
_RANDOM_MODEL_SIZE: dict[str, Any] = {"width": 128, "height": 128, "frames": 9, "steps": 4}

# A host's first steps take seconds longer, which would all be counted against the first variant. A CPU learns nothing
# about a size, and there a few frames do.
_WARM_UP_STEPS, _WARM_UP_FRAMES = 4, 5

# A clip and its comparison on two free CPU cores; a GPU needs a few seconds.
_SECONDS_ON_A_CPU = 60


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


@dataclass(frozen=True)
class _Demo:
    """What a run has to do: the job, the clips that are wanted, and what earlier runs left of them."""

    model: DemoModel
    job: Job
    without_kernel: list[str]
    variants: list[str]
    clips: FinishedClips
    results: FinishedResults
    heading: list[str]


def _prepare(options: argparse.Namespace, scratch: Path) -> _Demo:
    with Activity("looking at this machine"):
        model = demo_model(scratch)
        without_kernel = _without_kernel()
        job = _job(model, without_kernel)
        name, sources = "diffusers (embedded host)", []
        if options.comfyui is not None:
            version = ".".join(map(str, comfyui_version(options.comfyui)))
            name, sources = f"ComfyUI {version}", [options.comfyui / "comfy"]
        made_from = fingerprint(job, model, name, options.comfyui_python, sources)
    variants = [FULL_PRECISION, *MODES, *(BASELINES if options.baselines else ())]
    weights = "the trained demo model" if model.trained else "random weights, so the pictures are noise"
    return _Demo(
        model,
        job,
        without_kernel,
        variants,
        FinishedClips(options.output / "finished", made_from),
        FinishedResults(options.output, made_from, variants),
        about(job, name, weights),
    )


def _plan(demo: _Demo, missing: Sequence[str]) -> str:
    """What is going to be done and how long that takes, for the terminal."""
    done = [variant for variant in demo.variants if variant not in missing]
    lines = [*demo.heading]
    if demo.without_kernel:
        lines.append(
            f"No kernel runs {', '.join(demo.without_kernel)} here; the slow reference computes the same numbers. "
            "The demo then shows how close the modes are, and nothing about their speed."
        )
    if done:
        lines.append(f"used again from an earlier run: {', '.join(done)}")
    minutes = max(1, round(len(missing) * _SECONDS_ON_A_CPU / 60))
    takes = "a few seconds each" if torch.cuda.is_available() else f"about {minutes} min on two free CPU cores"
    if missing:
        lines.append(f"to sample: {', '.join(missing)} ({takes})")
    return "\n".join(lines)


def _sampled(options: argparse.Namespace, demo: _Demo, missing: Sequence[str]) -> list[Clip]:
    """The wanted clips; those that are missing are sampled and kept."""
    if missing:
        with _host(options, demo.model) as host:
            for clip in sample(host, demo.job, missing, demo.without_kernel):
                demo.clips.put(clip)
    found = [demo.clips.get(variant) for variant in demo.variants]
    return [clip for clip in found if clip is not None]


def main(arguments: list[str]) -> int:
    """Run the demo; 0 when all videos were written, 1 when ComfyUI does not start."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            demo = _prepare(options, Path(scratch))
            if not options.again and demo.results.are_there():
                text = (options.output / PAGE).read_text(encoding="utf-8")
                print(f"\n{text}\nNothing has changed since these were made, so nothing was sampled or written again.")
            else:
                missing = [variant for variant in demo.variants if options.again or demo.clips.get(variant) is None]
                print(_plan(demo, missing), flush=True)
                clips = _sampled(options, demo, missing)
                text, paths = write_results(options.output, clips, demo.heading, demo.without_kernel)
                demo.results.put(paths)
                print(f"\n{text}")
    except NotStarted as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\nvideos, comparison.webp, contact_sheet.png and {PAGE} are in {options.output}")
    return 0
