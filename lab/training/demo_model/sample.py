"""Draws clips from the trained model, and measures its VAE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ...demo.captions import CaptionEncoder
from ...demo.sampler import decode, denoise, half_precision, starting_noise
from ...demo.wan_dit import WanDiT
from ...demo.wan_vae import WanVAE
from . import clips


def sample(dit: WanDiT, vae: WanVAE, encoder: CaptionEncoder, captions: Sequence[str], *, seed: int) -> torch.Tensor:
    """One clip for each caption, number n from the noise of ``seed`` + n: (captions, 3, FRAMES, CANVAS, CANVAS)."""
    size = {"width": clips.CANVAS, "height": clips.CANVAS, "frames": clips.FRAMES}
    noise = torch.cat([starting_noise(seed + number, **size) for number in range(len(captions))])
    return decode(vae, denoise(dit, encoder, captions, noise))


@torch.no_grad()
def reconstruction_psnr(vae: WanVAE, scenes: clips.SceneBatch) -> float:
    """Peak signal to noise ratio, in dB, of whole clips that went through the VAE."""
    video = clips.whole_clips(scenes)
    with half_precision(video.device):
        drawn = [vae.decode(vae.encode(clip[None])).float().clamp(-1, 1) for clip in video]
    return 10 * math.log10(4 / F.mse_loss(torch.cat(drawn), video).item())
