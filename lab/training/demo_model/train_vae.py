"""Trains the VAE to give back windows of clips."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from ...demo.sampler import half_precision
from ...demo.scenes import random_scene
from ...demo.wan_vae import WanVAE
from . import clips
from .run import Run
from .state import Schedule, TrainingState

LATENT_NOISE = 0.1  # the posterior's standard deviation; the latent's own is 1
_WINDOWS, _WINDOW_FRAMES, _WINDOW_SIDE = 6, 17, 128
_SCALE_WEIGHT = 0.1
_MATRIX_RATE, _OTHER_RATE = 2e-3, 2e-3


def train_vae(dim: int, seconds: float, seed: int, device: torch.device, checkpoint: Path, run: Run) -> WanVAE:
    """Train for ``seconds``, going on from ``checkpoint`` if that file exists. Returns the averaged model."""
    torch.manual_seed(seed)
    model = WanVAE(dim).to(device)
    state = TrainingState(model, model.hidden_weights(), Schedule(seconds, _MATRIX_RATE, _OTHER_RATE))
    if checkpoint.exists():
        state.resume(checkpoint)
    rng = random.Random(seed + state.step_count)
    generator = torch.Generator().manual_seed(seed + state.step_count)
    while run.goes_on(state):
        scenes = clips.SceneBatch.of([random_scene(rng) for _ in range(_WINDOWS)], generator, device)
        loss, error = _loss(model, clips.windows(scenes, _WINDOW_FRAMES, _WINDOW_SIDE, rng))
        state.step(loss)
        run.report("vae", state, loss=loss, psnr=10 * torch.log10(4 / error))
        if run.checkpoint_due():
            state.save(checkpoint)
    state.save(checkpoint)
    model.load_state_dict(state.average)
    return model.eval()


def _loss(model: WanVAE, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with half_precision(video.device):
        latent = model.encode(video)
        drawn = model.decode(latent + LATENT_NOISE * torch.randn_like(latent))
    drawn, latent = drawn.float(), latent.float()
    difference = drawn - video
    # The latent is kept at mean 0 and variance 1 in every channel, so that none is lost in the noise.
    deviation, mean = torch.std_mean(latent, dim=(0, 2, 3, 4))
    scale = (mean.square() + (deviation - 1).square()).mean()
    error = difference.square().mean()
    loss = difference.abs().mean() + error + _SCALE_WEIGHT * scale
    return loss, error.detach()
