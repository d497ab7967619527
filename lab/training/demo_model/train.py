"""Trains the demo model: one command, one GPU, less than seven minutes on an H200.

    python -m lab train-demo-model --output lab/models/demo --work build/train_demo_model

Every stage has a budget of time rather than of steps. The work folder holds checkpoints: the same command goes on where
the last one was stopped, and does nothing but export once training is done. With `--continue-from lab/models/demo` an
exported model is trained on: its VAE stays, its diffusion model starts from where it was. Runs are seeded, but how many
steps fit into the budget depends on the machine, so that two runs give models that are alike and not identical.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from comfy_sage2.command_line import Parser, above_0, at_least_1, existing_file, output_folder, seed_number

from ...arguments import usable_device
from ...contact_sheet import Row, contact_sheet, spread
from ...demo.captions import CaptionEncoder
from ...demo.model import DemoModel
from ...demo.sampler import pixels
from ...demo.scenes import random_scene
from ...demo.wan_dit import DiTShape, WanDiT
from ...demo.wan_vae import WanVAE
from ...evaluation.caption_classifier import CLASSIFIER_FILE
from . import clips
from .export import export_model, export_weights
from .latents import LatentSet, give_wan_statistics
from .run import Run
from .sample import reconstruction_psnr, sample
from .train_classifier import train_classifier
from .train_dit import train_dit
from .train_vae import LATENT_NOISE, train_vae

_STATISTICS_CLIPS = 64
_SHEET_SEED = 1234


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m lab train-demo-model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the model files")
    parser.add_argument("--work", type=output_folder, required=True, help="folder for checkpoints")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--device", type=usable_device, default="cuda")
    parser.add_argument("--vae-dim", type=at_least_1, default=16, help="channels of the VAE at full resolution")
    parser.add_argument("--dit-dim", type=_dit_dim, default=256, help="a multiple of 128")
    parser.add_argument("--dit-ffn-dim", type=at_least_1, default=1024)
    parser.add_argument("--dit-layers", type=at_least_1, default=6)
    parser.add_argument("--vae-seconds", type=above_0, default=100)
    parser.add_argument("--latent-seconds", type=above_0, default=40, help="for drawing and encoding clips")
    parser.add_argument("--classifier-seconds", type=above_0, default=15)
    parser.add_argument("--dit-seconds", type=above_0, default=200)
    parser.add_argument("--continue-from", type=_exported, metavar="FOLDER", help="an exported model to train on")
    parser.add_argument("--stop-after", type=above_0, metavar="SECONDS", help="save and stop; run again to go on")
    return parser.parse_args(arguments)


def _dit_dim(text: str) -> int:
    dim = at_least_1(text)
    if dim % 128:
        raise argparse.ArgumentTypeError(f"expected a multiple of 128, got {dim}")
    return dim


def _exported(text: str) -> DemoModel:
    """A type of argument: the folder of an exported model."""
    model = DemoModel(Path(text), trained=True)
    for path in model.files:
        existing_file(str(path))
    return model


def _encoder(arguments: argparse.Namespace) -> CaptionEncoder:
    if arguments.continue_from is not None:
        return CaptionEncoder.load(arguments.continue_from.captions)
    return CaptionEncoder.random(arguments.seed)


def _dit(arguments: argparse.Namespace, device: torch.device) -> WanDiT:
    """The diffusion model to start from."""
    if arguments.continue_from is not None:
        return WanDiT.load(arguments.continue_from.dit).requires_grad_(True).to(device)
    torch.manual_seed(arguments.seed)
    return WanDiT(DiTShape(arguments.dit_dim, arguments.dit_ffn_dim, arguments.dit_layers)).to(device)


def _vae(arguments: argparse.Namespace, device: torch.device, run: Run) -> WanVAE | None:
    """The trained VAE, or None if the run's time was over before."""
    finished = arguments.work / "vae_finished.safetensors"
    if arguments.continue_from is not None:
        return WanVAE.load(arguments.continue_from.vae).to(device)
    if finished.exists():
        return WanVAE.load(finished).to(device)
    checkpoint = arguments.work / "vae.safetensors"
    vae = train_vae(arguments.vae_dim, arguments.vae_seconds, arguments.seed, device, checkpoint, run)
    if run.over:
        return None
    give_wan_statistics(vae, LATENT_NOISE, arguments.seed + 1, _STATISTICS_CLIPS)
    save_file({name: value.contiguous() for name, value in vae.state_dict().items()}, finished)
    return vae


def _latents(arguments: argparse.Namespace, vae: WanVAE, encoder: CaptionEncoder, device: torch.device) -> LatentSet:
    finished = arguments.work / "latents.safetensors"
    if finished.exists():
        return LatentSet.load(finished, device)
    data = LatentSet.make(vae, encoder, arguments.seed + 2, arguments.latent_seconds)
    data.save(finished)
    return data


def _show(arguments: argparse.Namespace, dit: WanDiT, vae: WanVAE, encoder: CaptionEncoder) -> None:
    """Print how well the VAE gives back clips, and draw a sheet of samples."""
    rng, generator = random.Random(_SHEET_SEED), torch.Generator().manual_seed(_SHEET_SEED)
    scenes = [random_scene(rng) for _ in range(clips.AT_ONCE)]
    psnr = reconstruction_psnr(vae, clips.SceneBatch.of(scenes, generator, arguments.device))
    print(f"VAE: {psnr:.2f} dB on {len(scenes)} whole clips")
    captions = [scene.caption() for scene in scenes]
    videos = sample(dit, vae, encoder, captions, seed=arguments.seed)
    rows = [Row(caption, spread(pixels(video))) for caption, video in zip(captions, videos, strict=True)]
    contact_sheet(rows).save(arguments.work / "samples.png")
    print("\n".join(captions))


def main(command_line: list[str]) -> int:
    """Run the command; 0 when training is done or was stopped as asked for."""
    arguments = _parse(command_line)
    run = Run(arguments.stop_after)
    device: torch.device = arguments.device
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")

    encoder = _encoder(arguments)
    vae = _vae(arguments, device, run)
    if vae is None:
        print("stopped in the VAE's training; run the same command to go on")
        return 0
    data = _latents(arguments, vae, encoder, device)
    dit = train_dit(
        _dit(arguments, device),
        encoder,
        data,
        arguments.dit_seconds,
        arguments.seed,
        arguments.work / "dit.safetensors",
        run,
        looks_first=arguments.continue_from is None,
    )

    torch.backends.cudnn.benchmark = False
    export_model(arguments.output, dit, vae, encoder)
    _show(arguments, dit, vae, encoder)
    if run.over:
        print("stopped in the diffusion model's training; run the same command to go on")
        return 0
    if not (arguments.output / CLASSIFIER_FILE).exists():
        classifier = train_classifier(arguments.classifier_seconds, arguments.seed + 3, device, run)
        export_weights(arguments.output / CLASSIFIER_FILE, classifier)
    return 0
