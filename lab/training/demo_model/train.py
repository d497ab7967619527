"""Trains the demo model: one GPU, 25 minutes of an H200 in all.

    python -m lab train-demo-model --output build/demo_model --work build/train_demo_model --compile --stop-after 560

Every stage has a budget of time rather than of steps: VAE 310 s, classifier 80 s, clips 220 s, diffusion model 760 s,
and about a minute to write files and to judge. A run ends after `--stop-after`; the same command goes on
where it stopped, from the checkpoints in the work folder, until it says "done": three runs of 560 s. Only the clips are
drawn in one piece, and not begun without the time for them. Where a work folder may be lost, copy
`vae_finished.safetensors` from it and the classifier from the output folder: they are not trained again.

With `--continue-from lab/models/demo` an exported model is trained on: its VAE stays, its diffusion model starts from
where it was. Runs are seeded, but how many steps fit into the budget depends on the machine, so that two runs give
models that are alike and not identical.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from comfy_sage2.command_line import Parser, above_0, at_least_1, existing_file, output_folder, seed_number

from ...arguments import usable_device
from ...contact_sheet import SheetRow, contact_sheet, spread
from ...demo.captions import CaptionEncoder
from ...demo.model import DemoModel
from ...demo.sampler import pixels
from ...demo.scenes import random_scene
from ...demo.wan_dit import DiTShape, WanDiT
from ...demo.wan_vae import WanVAE
from ...evaluation.caption_classifier import CLASSIFIER_FILE, CaptionClassifier
from . import clips
from .export import export_model, export_weights
from .judge import caption_accuracies
from .latents import LatentSet, give_wan_statistics
from .run import TrainingRun
from .sample import reconstruction_psnr, sample
from .train_classifier import train_classifier
from .train_dit import train_dit
from .train_vae import LATENT_NOISE, train_vae

_STATISTICS_CLIPS = 64
_SHEET_SEED = 1234
_JUDGED_CAPTIONS = 64


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
    parser.add_argument("--dit-ffn-dim", type=at_least_1, default=512)
    parser.add_argument("--dit-layers", type=at_least_1, default=5)
    parser.add_argument("--vae-seconds", type=above_0, default=310)
    parser.add_argument("--latent-seconds", type=above_0, default=220, help="for drawing and encoding clips")
    parser.add_argument("--classifier-seconds", type=above_0, default=80)
    parser.add_argument("--dit-seconds", type=above_0, default=760)
    parser.add_argument("--continue-from", type=_exported, metavar="FOLDER", help="an exported model to train on")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--stop-after", type=above_0, metavar="SECONDS", help="save and stop; run again to go on")
    options = parser.parse_args(arguments)
    if options.stop_after is not None and options.stop_after < options.latent_seconds:
        parser.error(
            f"argument --stop-after: expected at least the {options.latent_seconds:g} of --latent-seconds, "
            f"since clips are drawn in one piece, got {options.stop_after:g}"
        )
    return options


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


def _vae(arguments: argparse.Namespace, device: torch.device, run: TrainingRun) -> WanVAE | None:
    """The trained VAE, or None if the run's time was over before."""
    finished = arguments.work / "vae_finished.safetensors"
    if arguments.continue_from is not None:
        return WanVAE.load(arguments.continue_from.vae).to(device)
    if finished.exists():
        return WanVAE.load(finished).to(device)
    checkpoint = arguments.work / "vae.safetensors"
    seconds, compiled = arguments.vae_seconds, arguments.compile
    vae = train_vae(arguments.vae_dim, seconds, arguments.seed, device, checkpoint, run, compiled=compiled)
    if run.over:
        return None
    give_wan_statistics(vae, LATENT_NOISE, arguments.seed + 1, _STATISTICS_CLIPS)
    save_file({name: value.contiguous() for name, value in vae.state_dict().items()}, finished)
    return vae


def _classifier(arguments: argparse.Namespace, device: torch.device, run: TrainingRun) -> CaptionClassifier | None:
    """The trained classifier, or None if the run's time was over before."""
    finished = arguments.output / CLASSIFIER_FILE
    if not finished.exists():
        checkpoint = arguments.work / "classifier.safetensors"
        classifier = train_classifier(
            arguments.classifier_seconds, arguments.seed + 3, device, checkpoint, run, compiled=arguments.compile
        )
        if run.over:
            return None
        export_weights(finished, classifier)
    return CaptionClassifier.load(finished).to(device)


def _latents(
    arguments: argparse.Namespace, vae: WanVAE, encoder: CaptionEncoder, device: torch.device, run: TrainingRun
) -> LatentSet | None:
    """The clips to train on, or None if the run has not the time to draw them."""
    finished = arguments.work / "latents.safetensors"
    if finished.exists():
        return LatentSet.load(finished, device)
    if not run.has(arguments.latent_seconds):
        return None
    data = LatentSet.make(vae, encoder, arguments.seed + 2, arguments.latent_seconds, compiled=arguments.compile)
    data.save(finished)
    return data


def _show(
    arguments: argparse.Namespace, dit: WanDiT, vae: WanVAE, encoder: CaptionEncoder, classifier: CaptionClassifier
) -> None:
    """Print how well the VAE gives back clips and how much of captions is found, and draw a sheet of samples."""
    rng, generator = random.Random(_SHEET_SEED), torch.Generator().manual_seed(_SHEET_SEED)
    scenes = [random_scene(rng) for _ in range(clips.AT_ONCE)]
    psnr = reconstruction_psnr(vae, clips.SceneBatch.of(scenes, generator, arguments.device))
    print(f"VAE: {psnr:.2f} dB on {len(scenes)} whole clips")
    captions = [scene.caption() for scene in scenes]
    videos = sample(dit, vae, encoder, captions, seed=arguments.seed)
    rows = [SheetRow(caption, spread(pixels(video))) for caption, video in zip(captions, videos, strict=True)]
    contact_sheet(rows).save(arguments.work / "samples.png")
    print("\n".join(captions))
    for what, found in caption_accuracies(dit, vae, encoder, classifier, _JUDGED_CAPTIONS).items():
        print(f"{what} clips: " + ", ".join(f"{kind} {share:.3f}" for kind, share in found.items()))


def main(command_line: list[str]) -> int:
    """Run the command; 0 when training is done or was stopped as asked for."""
    arguments = _parse(command_line)
    run = TrainingRun(arguments.stop_after)
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
    classifier = _classifier(arguments, device, run)
    if classifier is None:
        print("stopped in the classifier's training; run the same command to go on")
        return 0
    data = _latents(arguments, vae, encoder, device, run)
    if data is None:
        print("stopped before the clips are drawn; run the same command to go on")
        return 0
    dit = train_dit(
        _dit(arguments, device),
        encoder,
        data,
        arguments.dit_seconds,
        arguments.seed,
        arguments.work / "dit.safetensors",
        run,
        looks_first=arguments.continue_from is None,
        compiled=arguments.compile,
    )

    torch.backends.cudnn.benchmark = False
    export_model(arguments.output, dit, vae, encoder)
    if run.over:
        print("stopped in the diffusion model's training; run the same command to go on")
        return 0
    _show(arguments, dit, vae, encoder, classifier)
    print("done")
    return 0
