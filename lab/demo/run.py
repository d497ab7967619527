"""`python -m lab demo`: one caption in full precision, precise, 8b and 4b, side by side.

Writes an mp4 for each, an animated comparison and a table to the output folder. The model is small: it shows how close
each mode comes to full precision, and says nothing about the speed of a real one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from comfy_sage2 import __version__
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.command_line import Parser
from comfy_sage2.dispatch import registry
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.system import machine
from tools.comfyui.folders import comfyui_folder, comfyui_version, reason_too_old_for_demo
from tools.comfyui.server import NotStarted

from ..arguments import folder
from ..pictures import write_animation, write_mp4
from ..progress import ProgressBar
from ..result_page import machine_line, table
from .comfyui_host import ComfyHost
from .job import FPS, FULL_PRECISION, MODES, Clip, Host, Job
from .metrics import psnr, ssim

PAGE = "results.md"
_PURPOSES = {
    FULL_PRECISION: "nothing is quantized: what the others are compared with",
    "precise": "Q and K in INT8, P and V in 16 bits: closest to full precision",
    "8b": "Q and K in INT8, P and V in FP8: close to full precision",
    "4b": "Q and K in INT4, P and V in FP8: fewer bits, for GPUs with INT4 tensor cores",
}
_HOW_TO_READ = (
    "PSNR compares the pixels with those of the video in full precision, in decibels: more is closer. Above 35 dB a "
    "difference is hard to see; below 25 dB things have other outlines. SSIM compares structures, and the cosine "
    "compares the latents before they are decoded; 1 is identical. One caption is one sample: by chance, a mode may "
    "come closer here than another one that is closer on average."
)
_SLOW = "No kernel runs {} here: the reference computes the same numbers in PyTorch, slowly."


def parse(arguments: list[str]) -> argparse.Namespace:
    """The demo's options; SystemExit with status 2, after one line, for wrong ones."""
    parser = Parser(prog="python -m lab demo", description=__doc__)
    parser.add_argument("--output", type=folder, default="demo-output", help="folder (default: %(default)s)")
    parser.add_argument("--comfyui", type=comfyui_folder, help="folder of a ComfyUI; without it, diffusers is the host")
    parser.add_argument("--comfyui-python", type=Path, default=sys.executable, help="Python with its requirements")
    options = parser.parse_args(arguments)
    if options.comfyui is not None and (reason := reason_too_old_for_demo(options.comfyui)) is not None:
        parser.error(f"argument --comfyui: {reason}")
    if shutil.which(str(options.comfyui_python)) is None:
        parser.error(f"argument --comfyui-python: {options.comfyui_python} is no program")
    return options


def modes_without_kernel(device: torch.device) -> list[str]:
    """The modes that only the reference computes on `device`."""

    def has_kernel(mode: str) -> bool:
        reasons = registry.explain(CallSignature.minimal(device, AttentionOptions(mode)))
        return any(reasons[kernel.name] is None for kernel in registry.kernels() if kernel.name in reasons)

    return [mode for mode in MODES if not has_kernel(mode)]


@contextmanager
def _host(options: argparse.Namespace) -> Iterator[Host]:
    if options.comfyui is None:
        from .diffusers_host import DiffusersHost  # only this host needs diffusers

        yield DiffusersHost()
        return
    with ComfyHost(options.comfyui, options.comfyui_python) as comfyui:
        yield comfyui


def sample(host: Host, job: Job, without_kernel: Sequence[str]) -> dict[str, Clip]:
    """The clip in full precision and in each mode."""
    clips = {}
    for mode in (FULL_PRECISION, *MODES):
        with ProgressBar(mode, part=0.5 / job.steps) as progress:  # the hosts report each step, and nothing in between
            clips[mode] = host.sample(job, mode, "reference" if mode in without_kernel else None, progress)
    return clips


def write_results(output: Path, clips: dict[str, Clip], heading: Sequence[str]) -> str:
    """Write everything; return the text of the page. The first clip is the one in full precision."""
    full = clips[FULL_PRECISION]
    rows, labels = [], {}
    for mode, clip in clips.items():
        write_mp4(output / f"{mode.replace(' ', '_')}.mp4", clip.frames, FPS)
        if clip is full:
            rows.append([mode, "–", "–", "–", _PURPOSES[mode]])
            labels[mode] = clip.frames
            continue
        decibels = psnr(clip.frames, full.frames)
        cosine = Agreement.of(clip.latent, full.latent).cosine
        structure = ssim(clip.frames, full.frames)
        rows.append([mode, f"{decibels:.2f}", f"{structure:.4f}", f"{cosine:.5f}", _PURPOSES[mode]])
        labels[f"{mode}: {decibels:.1f} dB"] = clip.frames
    write_animation(output / "comparison.webp", labels, FPS)
    parts = [
        "# One video with several attentions",
        "\n".join(heading),
        "\n".join(table(["attention", "PSNR (dB)", "SSIM", "cosine of latents", "what it is"], rows)),
        _HOW_TO_READ,
        "## What each attention did",
        *(f"{mode}:\n{clip.note}" for mode, clip in clips.items()),
    ]
    text = "\n\n".join(parts)
    (output / PAGE).write_text(text + "\n", encoding="utf-8")
    return text


def main(arguments: list[str]) -> int:
    """Run the demo; 0 when all videos were written, 1 when ComfyUI does not start."""
    options = parse(arguments)
    job, device = Job(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    without_kernel = modes_without_kernel(device)
    host = "diffusers"
    if options.comfyui is not None:
        host = f"ComfyUI {'.'.join(map(str, comfyui_version(options.comfyui)))}"
    heading = [
        f'- Video: "{job.caption}", {job.width} × {job.height} pixels, {job.frames} frames, {job.steps} steps, '
        f"guidance {job.guidance:g}, seed {job.seed}",
        f"- Host: {host}",
        f"- Machine: {machine_line(device)}, Python {machine.python()}; comfy_sage2 {__version__}",
        *([f"- {_SLOW.format(', '.join(without_kernel))}"] if without_kernel else []),
    ]
    takes = "under a minute" if device.type == "cuda" else "about 3 minutes on two free CPU cores"
    print(*heading, f"This takes {takes}.", sep="\n", flush=True)
    try:
        with _host(options) as chosen:
            clips = sample(chosen, job, without_kernel)
    except NotStarted as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{write_results(options.output, clips, heading)}")
    print(f"\nvideos, comparison.webp and {PAGE} are in {options.output}")
    return 0
