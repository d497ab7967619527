"""Seconds a step of the paper's models in ComfyUI with every attention that can be had here: one command, one table.

    python -m lab end-to-end --results docs/results

The models have the paper's sizes, random weights and ComfyUI's own classes; the largest have fewer layers, which the
table says. All attentions take turns in an order drawn anew in every round. Run it with a Python that has ComfyUI's
requirements; FlashAttention-3 and SageAttention 2 take part where they can be imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from comfy_sage2 import machine
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.settings import WHERE_FASTER, Settings
from comfy_sage2.command_line import Parser, at_least_1, given_or_new_seed, output_folder, seed_number
from tools.comfyui.folders import comfyui_folder, comfyui_folders, comfyui_version

from ..result_page import kernel_versions, page_head
from .families.calls import counted
from .families.declared import DeclaredModel, Family
from .families.models import load, sample, seconds_in_rounds, unlike_detected
from .families.paper import MODELS
from .overrides import attention_for_nothing, peers, with_override
from .sampling_steps import DEFAULT, NOTHING, enter_comfyui

MODES = ("8b", "precise", "4b", "exact")


@dataclass
class Steps:
    """Seconds a step of one model: attention -> one figure for each step of each round; why others are missing."""

    model: str
    layers: str
    tokens: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    peak_gib: float = 0.0


def measure(
    family: Family, shape: DeclaredModel, modes: list[str], rounds: int, seed: int, device: torch.device
) -> Steps:
    """Every attention on one model; RuntimeError when ComfyUI's detection does not find the real shape."""
    unlike = unlike_detected(family)
    if unlike:
        raise RuntimeError(f"ComfyUI's detection does not find this shape: {unlike}")
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    found = Steps(family.name, shape.layers)
    patcher = load(family, shape, torch.bfloat16 if is_gpu else torch.float32, device)
    candidates = dict(_candidates(patcher, modes, found.missing, device))
    with counted() as calls:
        able = _able(candidates, family, shape, found.missing)
    found.tokens = calls.longest
    found.seconds = seconds_in_rounds(able, family, shape, rounds, seed)
    found.peak_gib = torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else 0.0
    return found


def _candidates(
    patcher: Any, modes: list[str], missing: dict[str, str], device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Name and model of each attention; name -> reason of the others goes to `missing`."""
    yield DEFAULT, patcher.clone()
    others, reasons = peers()
    missing |= reasons
    for name, override in others.items():
        yield name, with_override(patcher, override)
    backend = "auto" if device.type == "cuda" else "reference"
    for mode in modes:
        quantizes = mode != "exact"
        settings = Settings(
            mode, backend=backend, rotate="auto" if quantizes else "off", when="always" if quantizes else WHERE_FASTER
        )
        patched = patch_model(patcher, settings)
        reason = sessions_of(patched)[-1].handler.idle_reason
        if reason is None:
            yield f"this node, {mode}", patched
        else:
            missing[f"this node, {mode}"] = reason
    yield NOTHING, with_override(patcher, attention_for_nothing)


def _able(candidates: dict[str, Any], family: Family, shape: DeclaredModel, missing: dict[str, str]) -> dict[str, Any]:
    """Those that can sample this model, each sampled for a step; the others go to `missing`."""
    able = {}
    for name, candidate in candidates.items():
        try:
            sample(candidate, family, shape, 1)
        except Exception as error:  # whatever a peer's package raises is its result
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            able[name] = candidate
    return able


def table(results: list[Steps]) -> Iterator[str]:
    """A line for each model and attention: median seconds a step, least to most, how many times as fast as default."""
    header = (
        "model",
        "layers",
        "tokens",
        "attention",
        "seconds a step",
        "least to most",
        "times as fast",
        "of possible",
    )
    yield f"| {' | '.join(header)} |"
    yield "| --- " * len(header) + "|"
    for steps in results:
        default = median(steps.seconds[DEFAULT]) if DEFAULT in steps.seconds else None
        nothing = median(steps.seconds[NOTHING]) if NOTHING in steps.seconds else None
        for name, seconds in sorted(steps.seconds.items(), key=lambda one: -median(one[1])):
            usual = median(seconds)
            faster = possible = "–"
            if default is not None:
                faster = f"{default / usual:.2f}"
            if default is not None and nothing is not None and default > nothing and name not in (DEFAULT, NOTHING):
                possible = f"{(default - usual) / (default - nothing):.0%}".replace("-", "−")
            yield (
                f"| {steps.model} | {steps.layers} | {steps.tokens:,} | {name} | {usual:.3f} "
                f"| {min(seconds):.3f} to {max(seconds):.3f} | {faster} | {possible} |"
            )


def page(results: list[Steps], failed: dict[str, str], about: str, kernels: str, rounds: int, command: str) -> str:
    """The whole page of docs/results."""
    lines = [
        *page_head(
            "The paper's models, end to end",
            machine=about,
            kernels=kernels,
            settings="`rotate` on auto, as in a new node; guard off; *always*, in exact *where it is faster*",
            command=command,
        ),
        f"Seconds a sampling step with random weights, medians of {rounds} rounds, shuffled anew in each; bf16. "
        f'"{NOTHING}" is what is left of a step; "possible" is the share of the time of ComfyUI\'s '
        "attention that is saved. Attentions that take no mask leave such calls to ComfyUI.",
        "",
        *table(results),
    ]
    missing = {f"{steps.model}: {name}": reason for steps in results for name, reason in steps.missing.items()}
    reasons = failed | missing
    if reasons:
        lines += ["", "## Not measured", "", *(f"- {name}: {reason}" for name, reason in reasons.items())]
    return "\n".join(lines) + "\n"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m lab end-to-end", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=comfyui_folder, help="folder of ComfyUI (default: the first one found)")
    parser.add_argument("--only", default="", help="part of a model's name, such as flux")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="of our node")
    parser.add_argument("--rounds", type=at_least_1, default=5, help="default: 5")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on any machine: to see that it runs")
    parser.add_argument("--seed", type=seed_number, help="of the order of turns (default: another one in every run)")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write end-to-end.md and .json there")
    options = parser.parse_args(arguments)
    options.models = parser.with_part(options.only, "model", MODELS)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("the real shapes need a GPU, and this torch sees none: --tiny runs anywhere")
    if options.tiny and options.results is not None:
        parser.error("--results is a page on the real shapes: leave it out with --tiny")
    options.folders = [options.comfyui] if options.comfyui else comfyui_folders()
    if not options.folders:
        parser.error("there is no ComfyUI in the usual folders: name its folder with --comfyui")
    return options


def main(arguments: list[str]) -> int:
    """Run the command; 0 when every model was measured."""
    options = _parse(arguments)
    folder: Path = options.folders[0].resolve()
    enter_comfyui(folder, cpu=not torch.cuda.is_available())
    logging.getLogger().setLevel(logging.WARNING)
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    seed = given_or_new_seed(options.seed)
    about = f"{machine.summary(device)}, ComfyUI {'.'.join(map(str, comfyui_version(folder)))}"
    command = " ".join(["python -m lab end-to-end", *arguments])
    results: list[Steps] = []
    failed: dict[str, str] = {}
    text = ""
    for family in options.models:
        shape = family.tiny if options.tiny else family.real
        try:
            with torch.inference_mode():
                results.append(measure(family, shape, options.modes, options.rounds, seed, device))
        except Exception as error:  # it is told, and does not cost the other models
            failed[family.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            logging.exception(family.name)
        comfy.model_management.unload_all_models()
        gc.collect()
        comfy.model_management.soft_empty_cache()
        text = page(results, failed, about, kernel_versions(device), options.rounds, command)
        if options.results is not None:  # after each, so that what is found stays found
            _write(options.results, results, text)
        print(f"{family.name}: {'failed' if family.name in failed else 'done'}", flush=True)
    print(f"\n{text}")
    return int(bool(failed))


def _write(folder: Path, results: list[Steps], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "end-to-end.md").write_text(text, encoding="utf-8")
    document = json.dumps([asdict(steps) for steps in results], indent=1)
    (folder / "end-to-end.json").write_text(document + "\n", encoding="utf-8")
