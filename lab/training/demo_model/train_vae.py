"""Trains the VAE to give back windows of clips."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from ...demo.sampler import half_precision
from ...demo.scenes import random_scene
from ...demo.wan_vae import WanVAE
from . import clips
from .run import TrainingRun
from .state import TrainingSchedule, TrainingState

LATENT_NOISE = 0.1  # the posterior's standard deviation; the latent's own is 1
_MOST_NOISE = 0.3  # the decoder also has to bear what the diffusion model leaves
_WINDOWS, _WINDOW_FRAMES, _WINDOW_SIDE = 6, 17, 128
_SCALE_WEIGHT, _EDGE_WEIGHT, _ROUGHNESS_WEIGHT = 0.1, 1.0, 0.1
_MATRIX_RATE, _OTHER_RATE = 2e-3, 2e-3


def train_vae(
    dim: int,
    seconds: float,
    seed: int,
    device: torch.device,
    checkpoint: Path,
    run: TrainingRun,
    *,
    compiled: bool = False,
) -> WanVAE:
    """Train for ``seconds``, going on from ``checkpoint`` if that file exists. Returns the averaged model.

    ``compiled``: through torch.compile.
    """
    torch.manual_seed(seed)
    model = WanVAE(dim).to(device)
    state = TrainingState(model, model.hidden_weights(), TrainingSchedule(seconds, _MATRIX_RATE, _OTHER_RATE))
    if checkpoint.exists():
        state.resume(checkpoint)
    rng = random.Random(seed + state.step_count)
    generator = torch.Generator().manual_seed(seed + state.step_count)
    gives_back = torch.compile(_give_back, dynamic=False) if compiled else _give_back
    while run.goes_on(state):
        scenes = clips.SceneBatch.of([random_scene(rng) for _ in range(_WINDOWS)], generator, device)
        video = clips.windows(scenes, _WINDOW_FRAMES, _WINDOW_SIDE, rng)
        with half_precision(device):
            drawn, latent = gives_back(model, video)
        loss, error = _loss(drawn.float(), latent.float(), video)
        state.step(loss)
        run.report("vae", state, loss=loss, psnr=10 * torch.log10(4 / error))
        if run.checkpoint_due():
            state.save(checkpoint)
    state.save(checkpoint)
    model.load_state_dict(state.average)
    return model.eval()


def _give_back(model: WanVAE, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the decoder makes of the latent with noise, and the latent without."""
    latent = model.encode(video)
    noise = _MOST_NOISE * torch.rand(len(latent), 1, 1, 1, 1, device=latent.device)
    return model.decode(latent + noise * torch.randn_like(latent)), latent


def _loss(drawn: torch.Tensor, latent: torch.Tensor, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    difference = drawn - video
    # The latent is kept at mean 0 and variance 1 in every channel, so that none is lost in the noise.
    deviation, mean = torch.std_mean(latent, dim=(0, 2, 3, 4))
    scale = (mean.square() + (deviation - 1).square()).mean()
    error = difference.square().mean()
    # Outlines are few of the pixels: the slopes of the difference, along height and width, count by themselves.
    edges = sum(difference.diff(dim=axis).abs().mean() for axis in (3, 4)) / 2
    loss = difference.abs().mean() + error + _EDGE_WEIGHT * edges
    return loss + _SCALE_WEIGHT * scale + _ROUGHNESS_WEIGHT * roughness(latent), error.detach()


def roughness(latent: torch.Tensor) -> torch.Tensor:
    """1 minus the correlation of neighbors in time, height and width: about 1 for noise, 0 for a constant.

    A diffusion model learns smooth latents sooner. Where this was no part of the loss, neighbors correlated by 0.32 in
    space and by 0.07 in time. The first frame is a picture, and has no neighbor in time.
    """
    variance = latent.var(dim=(0, 2, 3, 4), keepdim=True)
    after_first = latent[:, :, 1:]
    parts = [(part.diff(dim=axis).square() / variance).mean() / 2 for axis, part in
             ((2, after_first), (3, latent), (4, latent)) if part.shape[axis] > 1]  # fmt: skip
    return torch.stack(parts).mean()
