"""`python -m lab eval`: the paper's accuracy tables, or with --end-to-end the quality of whole videos.

The tables are measured on Q, K and V of the demo model and on synthetic tensors with the paper's outliers.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from pathlib import Path

import torch

from comfy_sage2 import machine, registry
from comfy_sage2.command_line import Parser, at_least_1, output_folder, seed_number
from comfy_sage2.options import AttentionOptions
from comfy_sage2.request import AttentionRequest
from lab.progress import ProgressBar

from ..arguments import check_kernel, usable_device, usual_device
from ..demo.captions import CaptionEncoder
from ..demo.model import TRAINED_FOLDER, DemoModel
from ..demo.wan_dit import WanDiT
from .caption_classifier import CLASSIFIER_FILE
from .demo_capture import demo_samples
from .end_to_end import EndToEndJob, run_end_to_end
from .measurement import measure
from .methods import tables
from .report import as_json, markdown
from .samples import AttentionSample
from .structure import structure
from .synthetic import synthetic_samples

_SYNTHETIC_LAYERS, _SYNTHETIC_TOKENS = 6, 2304


def _parser() -> Parser:
    parser = Parser(prog="python -m lab eval", description=__doc__)
    parser.add_argument(
        "--output", type=output_folder, default="eval-output", help="folder for tables, JSON and charts"
    )
    parser.add_argument("--model", type=Path, help="folder of the demo model (default: the one of this repository)")
    parser.add_argument("--only", choices=("demo", "synthetic"), help="which tensors; default: all there are")
    backends = ["auto", *(backend.name for backend in registry.backends())]
    parser.add_argument(
        "--backend", choices=backends, default="auto", help="kernel to measure beside the reference; 'reference': none"
    )
    parser.add_argument(
        "--device", type=usable_device, default=usual_device(), help="cuda where there is one, else cpu"
    )
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--steps", type=at_least_1, default=20, help="sampling steps of the demo model")
    parser.add_argument("--every-step", type=at_least_1, default=6, help="every how many of them tensors are kept")
    parser.add_argument("--side", type=_side, default=256, help="pixels; a multiple of 16")
    parser.add_argument("--frames", type=_frames, default=33, help="1 more than a multiple of 4")
    parser.add_argument("--tokens", type=at_least_1, default=_SYNTHETIC_TOKENS, help="of the synthetic tensors")
    parser.add_argument("--end-to-end", action="store_true", help="sample videos with every attention and compare them")
    parser.add_argument(
        "--prompts", type=at_least_1, default=32, help="with --end-to-end: captions, each with its own seed"
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="ROW", help="with --end-to-end: attentions beside full precision, in this order"
    )
    parser.add_argument("--workers", type=at_least_1, default=_cores(), help="with --end-to-end on a CPU: processes")
    return parser


def _cores() -> int:
    return os.cpu_count() or 1


def _side(text: str) -> int:
    side = at_least_1(text)
    if side % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16, got {side}")
    return side


def _frames(text: str) -> int:
    frames = at_least_1(text)
    if frames % 4 != 1:
        raise argparse.ArgumentTypeError(f"expected 1 more than a multiple of 4, got {frames}")
    return frames


def _kernel(name: str, device: torch.device, parser: Parser) -> str | None:
    """The accelerated backend to measure, or None for the reference alone; ends where the named one cannot run."""
    if name == "reference":
        return None
    if name == "auto":
        reasons = registry.explain(AttentionRequest.minimal(device, AttentionOptions()))
        return next((b.name for b in registry.kernels() if reasons[b.name] is None), None)
    check_kernel(name, "--backend", device, parser)
    return name


def _check(options: argparse.Namespace, parser: Parser) -> None:
    """End where an argument asks for something that is not there."""
    if options.rows is not None and not options.end_to_end:
        parser.error("argument --rows: the tables always have all rows; add --end-to-end or leave it out")
    uses_model = options.end_to_end or options.only != "synthetic"
    named = options.model is not None
    options.model = options.model or TRAINED_FOLDER
    if uses_model and (named or options.end_to_end or options.only):
        model = DemoModel(options.model, trained=True)
        files = [model.dit, model.captions]
        if options.end_to_end:
            files += [model.vae, model.folder / CLASSIFIER_FILE]
        for path in files:
            if not path.is_file():
                parser.error(f"argument --model: {path} is missing; name the folder of the trained demo model")


def _end_to_end_job(options: argparse.Namespace, kernel: str | None, parser: Parser) -> EndToEndJob:
    """The videos to sample; ends where a row is asked for that there is not."""
    rows = None if options.rows is None else tuple(options.rows)
    job = EndToEndJob(options.prompts, options.seed, options.steps, options.side, options.frames, kernel, rows)
    try:
        job.attentions()
    except ValueError as error:
        parser.error(f"argument --rows: {error}")
    return job


def _demo(options: argparse.Namespace, device: torch.device) -> list[AttentionSample]:
    model = DemoModel(options.model, trained=True)
    with ProgressBar("sampling the demo model") as progress:
        return demo_samples(
            WanDiT.load(model.dit).to(device),
            CaptionEncoder.load(model.captions),
            seed=options.seed,
            steps=options.steps,
            every_step=options.every_step,
            side=options.side,
            frames=options.frames,
            progress=progress,
        )


def _sources(options: argparse.Namespace, device: torch.device) -> dict[str, tuple[str, list[AttentionSample]]]:
    """File name -> what the samples are, and the samples."""
    wanted = [options.only] if options.only else ["demo", "synthetic"]
    found: dict[str, tuple[str, list[AttentionSample]]] = {}
    if "demo" in wanted and (DemoModel(options.model, True).dit.is_file() or options.only):
        samples = _demo(options, device)
        shape = tuple(samples[0].q.shape)
        found["demo"] = (f"Q, K, V of the demo model ({_places(samples)}, {shape[2]} tokens)", samples)
    if "synthetic" in wanted:
        samples = synthetic_samples(options.seed, layers=_SYNTHETIC_LAYERS, tokens=options.tokens)
        found["synthetic"] = (f"synthetic Q, K, V with outliers ({_places(samples)}, {options.tokens} tokens)", samples)
    return found


def _places(samples: list[AttentionSample]) -> str:
    layers, steps = ({getattr(sample, name) for sample in samples} for name in ("layer", "step"))
    return f"{len(layers)} layers, {len(steps)} step{'s' if len(steps) > 1 else ''}"


def _run_tables(options: argparse.Namespace, device: torch.device, kernel: str | None) -> str:
    parts = []
    for name, (source, samples) in _sources(options, device).items():
        with ProgressBar(f"measuring: {name}") as progress:
            measured = measure(tables(kernel), samples, device, progress)
        found = structure(samples)
        parts.append(markdown(measured, source, found))
        data = as_json(measured, source, found, [(sample.layer, sample.step) for sample in samples])
        (options.output / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return "\n\n".join(parts)


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything that was asked for was measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(options, parser)
    device: torch.device = options.device
    kernel = _kernel(options.backend, device, parser)
    job = _end_to_end_job(options, kernel, parser) if options.end_to_end else None
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if job is not None:
        text = run_end_to_end(DemoModel(options.model, True), job, device, options.workers, options.output)
        name = "end_to_end.md"
    else:
        text, name = _run_tables(options, device, kernel), "tables.md"
    heading = f"Machine: {machine.summary(device)}; kernel: {kernel or 'none, reference only'}"
    command = shlex.join(["python", "-m", "lab", "eval", *arguments])
    text = f"{heading}. Command: `{command}`; {time.monotonic() - start:.0f} s.\n\n{text}\n"
    (options.output / name).write_text(text, encoding="utf-8")
    print("\n" + text)
    return 0
