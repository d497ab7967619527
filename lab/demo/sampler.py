"""Samples the demo model in plain PyTorch: Euler steps of flow matching with classifier-free guidance."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import torch

from .captions import CaptionEncoder
from .wan_dit import WanDiT
from .wan_statistics import denormalized
from .wan_vae import LATENT_CHANNELS, WanVAE

TIMESTEPS = 1000  # the time that Wan is told at noise level 1
_SPACE, _TIME = 8, 4  # what the VAE divides sides and frames by


def noise_levels(steps: int, shift: float) -> list[tuple[float, float]]:
    """Each step's noise level and the next one's, from 1 to 0, shifted toward noise as ModelSamplingSD3 does."""
    linear = [1 - step / steps for step in range(steps + 1)]
    shifted = [shift * level / (1 + (shift - 1) * level) for level in linear]
    return list(itertools.pairwise(shifted))


def starting_noise(seed: int, *, width: int, height: int, frames: int) -> torch.Tensor:
    """(1, 16, 1 + (frames - 1) / 4, height / 8, width / 8) on the CPU; the same for a seed on every machine."""
    shape = (1, LATENT_CHANNELS, 1 + (frames - 1) // _TIME, height // _SPACE, width // _SPACE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def half_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a GPU matrix products are in bfloat16; the CPU computes in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def denoise(
    dit: WanDiT,
    encoder: CaptionEncoder,
    captions: Sequence[str],
    noise: torch.Tensor,
    *,
    steps: int = 30,
    guidance: float = 4.0,
    shift: float = 3.0,
    before_step: Callable[[int], None] = lambda step: None,
    in_float32: bool = False,
) -> torch.Tensor:
    """Turn noise (captions, 16, frames, height, width) into latents of the captions, on the model's device.

    ``before_step`` is called with the number of each step. ``in_float32``: on a GPU too.
    """
    device = next(dit.parameters()).device
    x = noise.to(device)
    text = torch.cat([encoder.encode(caption) for caption in captions]).to(device)
    text = torch.cat([text, torch.zeros_like(text)])
    with contextlib.nullcontext() if in_float32 else half_precision(device):
        for step, (sigma, following) in enumerate(noise_levels(steps, shift)):
            before_step(step)
            timestep = torch.full((len(text),), sigma * TIMESTEPS, device=device)
            said, unsaid = dit(torch.cat([x, x]), timestep, text).float().chunk(2)
            x = x + (following - sigma) * (unsaid + guidance * (said - unsaid))
    return x


@torch.no_grad()
def decode(vae: WanVAE, latents: torch.Tensor) -> torch.Tensor:
    """Latents as the diffusion model has them to videos (batch, 3, frames, height, width) in [-1, 1], on the CPU.

    One after the other: the pixels of many would not fit into memory.
    """
    with half_precision(latents.device):
        videos = [vae.decode(denormalized(latent[None])).float().clamp(-1, 1).cpu() for latent in latents]
    return torch.cat(videos)


def pixels(video: torch.Tensor) -> torch.Tensor:
    """(3, frames, height, width) in [-1, 1] to (frames, height, width, 3) uint8."""
    return ((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()
