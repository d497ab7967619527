"""Seconds a sampling step of Wan 2.1 in ComfyUI with different attentions, in one process and without a server.

    python -m lab steps --comfyui ~/ComfyUI --json steps.json

The models have the shapes of the real ones and random weights: what a step costs does not depend on their values.
Attentions take turns in an order drawn anew in every round. Run it with a Python that has ComfyUI's requirements,
comfy-kitchen among them for the row of ComfyUI's INT8 attention.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from comfy_sage2 import machine
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.command_line import Parser, at_least_1, output_file, seed_number
from comfy_sage2.options import MODES as ATTENTION_MODES
from tools.comfyui.folders import comfyui_folder, comfyui_folders, comfyui_version
from tools.comfyui.launch import TorchvisionOperators

from ..arguments import share
from ..demo import tiny_wan
from .overrides import attention_for_nothing, peers, share_of_the_blocks, with_override

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TEXT_TOKENS, TEXT_CHANNELS = 512, 4096
DEFAULT, NOTHING = "ComfyUI's default", "attention for nothing"


@dataclass(frozen=True)
class WanModel:
    """A Wan 2.1 text-to-video model and the latent it samples: (frames, height, width) of 8 x 8 pixels each."""

    dim: int
    ffn_dim: int
    layers: int
    latent: tuple[int, int, int]
    steps: int

    @property
    def tokens(self) -> int:
        frames, height, width = self.latent
        return frames * (height // 2) * (width // 2)


MODELS = {
    "wan-1.3b-480p": WanModel(1536, 8960, 30, (21, 60, 104), steps=5),
    "wan-14b-720p": WanModel(5120, 13824, 40, (21, 90, 160), steps=1),
    "tiny": WanModel(256, 512, 2, (3, 8, 8), steps=3),
}


@dataclass(frozen=True)
class NodeSetting:
    """A setting of our node; all else is as in a new one, but for `when`, so that the mode computes every call."""

    mode: str
    guard: bool = False

    def on(self, device: torch.device) -> Settings:
        backend = "auto" if device.type == "cuda" else "reference"
        return Settings(mode=self.mode, backend=backend, guard=self.guard, when=ALWAYS)


NODES = {
    "off": NodeSetting("off"),
    "8b": NodeSetting("8b"),
    "4b": NodeSetting("4b"),
    "precise": NodeSetting("precise"),
    "exact": NodeSetting("exact"),
    "8b guarded": NodeSetting("8b", guard=True),
}


@dataclass(frozen=True)
class Measurement:
    """Seconds from the end of one step to the end of the next: their median, least and most."""

    model: str
    tokens: int
    dtype: str
    attention: str
    seconds_a_step: float
    least: float
    most: float
    steps: int
    peak_gib: float
    report: str


def load(model: WanModel, dtype: torch.dtype, device: torch.device) -> Any:
    """ComfyUI's ModelPatcher of a model with random weights on `device`."""
    import comfy.sd

    weights = tiny_wan.random_weights(tiny_wan.dit_shapes(model.dim, model.ffn_dim, model.layers), 0, device, dtype)
    patcher = comfy.sd.load_diffusion_model_state_dict(
        weights, model_options={"dtype": dtype, "load_device": device, "offload_device": device}
    )
    if patcher is None:
        raise SystemExit("this ComfyUI does not recognize the weights as those of Wan 2.1")
    return patcher


def attentions(
    patcher: Any, modes: list[str], listed: list[tuple[str, float]], device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Name and model of each attention; says which are left out."""
    yield DEFAULT, patcher.clone()
    others, missing = peers()
    for name, reason in missing.items():
        print(f"{name}: left out, {reason}")
    for name, override in others.items():
        yield name, with_override(patcher, override)
    for mode in modes:
        patched = patch_model(patcher, NODES[mode].on(device))
        idle_reason = sessions_of(patched)[-1].dispatcher.idle_reason
        if idle_reason is None or mode == "off":
            yield f"SageAttention2 node {mode}", patched
        else:
            print(f"SageAttention2 node {mode}: left out, {idle_reason}")
    for mode, of_blocks in listed:
        yield f"{mode}, {of_blocks:.0%} of the blocks", with_override(patcher, share_of_the_blocks(mode, of_blocks))
    yield NOTHING, with_override(patcher, attention_for_nothing)


def seconds_of_steps(patcher: Any, model: WanModel, steps: int, device: torch.device) -> list[float]:
    """Sample `steps` + 1 steps of fresh noise (cfg 1, Euler) and time all but the first."""
    import comfy.sample

    noise = torch.randn(1, tiny_wan.LATENT_CHANNELS, *model.latent)
    text = [[torch.randn(1, TEXT_TOKENS, TEXT_CHANNELS), {}]]
    ends: list[float] = []

    def step_ended(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    comfy.sample.sample(
        patcher, noise, steps + 1, 1.0, "euler", "simple", text, text, torch.zeros_like(noise), callback=step_ended,
        disable_pbar=True, seed=0,
    )  # fmt: skip
    return [end - begin for begin, end in pairwise(ends)]


def measure(
    name: str,
    model: WanModel,
    dtype_name: str,
    modes: list[str],
    listed: list[tuple[str, float]],
    steps: int,
    rounds: int,
    rng: random.Random,
    device: torch.device,
) -> list[Measurement]:
    """All attentions on one model, in rounds in which each has its turn."""
    patcher = load(model, DTYPES[dtype_name], device)
    candidates = dict(attentions(patcher, modes, listed, device))
    seconds: dict[str, list[float]] = {attention: [] for attention in candidates}
    peaks = dict.fromkeys(candidates, 0.0)
    for _ in range(rounds):
        for attention in rng.sample(list(candidates), len(candidates)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found = seconds_of_steps(candidates[attention], model, steps, device)
            seconds[attention] += found
            if device.type == "cuda":
                peaks[attention] = max(peaks[attention], torch.cuda.max_memory_allocated() / 2**30)
            print(f"{name} {dtype_name} {attention}: {median(found):.3f} s a step", flush=True)
    results = []
    for attention, patched in candidates.items():
        report = "\n".join(session_report(session) for session in sessions_of(patched))
        if report:
            print(report)
        of_steps = seconds[attention]
        result = Measurement(
            name, model.tokens, dtype_name, attention, median(of_steps), min(of_steps), max(of_steps), len(of_steps),
            peaks[attention], report,
        )  # fmt: skip
        results.append(result)
    return results


def table(results: list[Measurement]) -> Iterator[str]:
    """A line for each measurement, with the speed relative to ComfyUI's default attention."""
    default = {(result.model, result.dtype): result.seconds_a_step for result in results if result.attention == DEFAULT}
    yield "| model | tokens | dtype | attention | seconds a step | least to most | times as fast | peak GiB |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for result in results:
        ratio = default[result.model, result.dtype] / result.seconds_a_step
        yield (
            f"| {result.model} | {result.tokens} | {result.dtype} | {result.attention} | {result.seconds_a_step:.3f} "
            f"| {result.least:.3f} to {result.most:.3f} | {ratio:.2f} | {result.peak_gib:.2f} |"
        )


def enter_comfyui(folder: Path, *, cpu: bool = False) -> None:
    """Make ComfyUI's packages importable, with its command line left at the defaults. cpu: leave GPUs alone.

    SystemExit with one line in a Python that lacks what ComfyUI needs.
    """
    sys.meta_path.insert(0, TorchvisionOperators())
    sys.path.insert(0, str(folder))
    try:
        import comfy.cli_args

        comfy.cli_args.args.cpu = cpu or not torch.cuda.is_available()
        import comfy.model_management
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the ComfyUI at {folder} needs {error.name}, which {sys.executable} does not have; "
            "run this with a Python that has ComfyUI's requirements"
        ) from None


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = Parser(
        prog="python -m lab steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=comfyui_folder, help="folder of ComfyUI (default: the first one found)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["wan-1.3b-480p", "wan-14b-720p"])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", choices=list(NODES), default=["8b"], help="of our node")
    parser.add_argument(
        "--listed-modes",
        nargs="+",
        choices=ATTENTION_MODES,
        default=[],
        help="also with lists of some of the key blocks, at random",
    )
    parser.add_argument(
        "--listed-shares", nargs="+", type=share, default=[0.5], metavar="SHARE", help="of the blocks (default: 0.5)"
    )
    parser.add_argument(
        "--steps", type=at_least_1, help="steps to time (default: 5 of the small model, 1 of the large one)"
    )
    parser.add_argument("--rounds", type=at_least_1, default=1, help="default: 1")
    parser.add_argument("--seed", type=seed_number, help="of the order of turns (default: another one in every run)")
    parser.add_argument("--json", type=output_file, help="write the result here")
    options = parser.parse_args(arguments)
    folders = [options.comfyui] if options.comfyui else comfyui_folders()
    if not folders:
        parser.error("there is no ComfyUI in the usual folders: name its folder with --comfyui")
    folder = folders[0].resolve()
    enter_comfyui(folder)
    logging.getLogger().setLevel(logging.WARNING)
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    rng = random.Random(options.seed)
    results = []
    with torch.inference_mode():
        for name in options.models:
            model = MODELS[name]
            for dtype_name in options.dtypes:
                results += measure(
                    name,
                    model,
                    dtype_name,
                    options.modes,
                    list(product(options.listed_modes, options.listed_shares)),
                    options.steps or model.steps,
                    options.rounds,
                    rng,
                    device,
                )
                comfy.model_management.unload_all_models()
                gc.collect()
                comfy.model_management.soft_empty_cache()
    about = machine.summary(device)
    version = ".".join(map(str, comfyui_version(folder)))
    print(f"\nComfyUI {version}, {about}\n", *table(results), sep="\n")
    if options.json:
        document = {"comfyui": version, "machine": about, "steps": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0
