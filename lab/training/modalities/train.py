"""Trains a language model, an image classifier and a transcriber of melodies, and measures every attention in them.

    python -m lab train-modalities --output build/modalities

The paper's other modalities at a size that can be trained anywhere: a GPU makes better models, a CPU will do. Results
are printed as markdown and written to results.md and results.json; the models are not kept: the command makes them.
timm and torchvision have to be there: `make modalities-environment` makes an environment that has them.
"""

from __future__ import annotations

import argparse
import json

import torch

from comfy_sage2 import machine
from comfy_sage2.command_line import Parser, above_0, at_least_1, output_folder, seed_number

from ...arguments import check_kernel, kernel_names, usable_device, usual_device
from ...evaluation.variants import variants
from . import language, melodies

# requirements/modalities.txt says why the project's first environment has no timm.
_TIMM_MISSING = """{name} is missing: the image classifier is timm's, which needs torchvision. Either
    make modalities-environment
    .venv-modalities/bin/python -m lab train-modalities …
or, to keep the torch that is there, install timm and the torchvision that belongs to that torch."""


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m lab train-modalities",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the results")
    parser.add_argument(
        "--device", type=usable_device, default=usual_device(), help="cuda where there is one, else cpu"
    )
    parser.add_argument("--language-seconds", type=above_0, default=60)
    parser.add_argument("--images-seconds", type=above_0, default=30)
    parser.add_argument("--melodies-seconds", type=above_0, default=60)
    parser.add_argument("--pieces", type=at_least_1, default=128, help="of the test text, 1,024 symbols each")
    parser.add_argument("--pictures", type=at_least_1, default=2048, help="to test on")
    parser.add_argument("--clips", type=at_least_1, default=512, help="of melodies to test on")
    parser.add_argument("--kernel", choices=kernel_names(), help="a kernel backend to measure beside the reference")
    parser.add_argument("--seed", type=seed_number, default=0)
    options = parser.parse_args(arguments)
    check_kernel(options.kernel, "--kernel", options.device, parser)
    return options


def main(command_line: list[str]) -> int:
    """Run the command; 0 when all models were trained and measured."""
    arguments = _parse(command_line)
    try:
        from . import images
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("timm", "torchvision"):
            raise
        raise SystemExit(_TIMM_MISSING.format(name=missing)) from None
    device: torch.device = arguments.device
    arguments.output.mkdir(parents=True, exist_ok=True)
    text, test = language.corpus()
    print(f"corpus: {len(text)} symbols to train on, {len(test)} to test on", flush=True)
    speaker = language.train(text, arguments.language_seconds, arguments.seed, device)
    viewer = images.train(arguments.images_seconds, arguments.seed, device)
    listener = melodies.train(arguments.melodies_seconds, arguments.seed, device)
    causal = variants(arguments.kernel, is_causal=True, smooth_v=True)
    results = {
        name: {
            "language": language.measure(speaker, test, arguments.pieces, causal[name]),
            "images": images.measure(viewer, arguments.pictures, arguments.seed + 1, attend),
            "melodies": melodies.measure(listener, arguments.clips, arguments.seed + 1, attend),
        }
        for name, attend in variants(arguments.kernel, smooth_v=True).items()
    }
    seconds = (arguments.language_seconds, arguments.images_seconds, arguments.melodies_seconds)
    lines = [
        f"Machine: {machine.summary(device)}. Training: {', '.join(f'{one:.0f} s' for one in seconds)}.",
        "",
        "| Attention | Perplexity | Next-symbol accuracy | Image loss | Image accuracy | Melody loss | Note errors |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        spoken = f"{found['language']['perplexity']:.4f} | {found['language']['accuracy']:.2%}"
        seen = f"{found['images']['loss']:.4f} | {found['images']['accuracy']:.2%}"
        heard = f"{found['melodies']['loss']:.4f} | {found['melodies']['errors']:.2%}"
        lines.append(f"| {name} | {spoken} | {seen} | {heard} |")
    print("\n".join(lines))
    (arguments.output / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0
