"""Draws clips from the trained model, and pictures of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from lab.demo.captions import CaptionEncoder
from lab.demo.sampler import decode, denoise, half_precision, starting_noise
from lab.demo.wan_dit import WanDiT
from lab.demo.wan_vae import WanVAE

from . import clips

_SHEET_FRAMES = 6


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


def contact_sheet(videos: torch.Tensor, frames: int = _SHEET_FRAMES) -> torch.Tensor:
    """Frames evenly spread over each clip, one clip a row: (rows * height, frames * width, 3) uint8."""
    chosen = torch.linspace(0, videos.shape[2] - 1, frames).round().long()
    rows = videos[:, :, chosen].permute(0, 3, 2, 4, 1)
    pixels = ((rows + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.flatten(2, 3).flatten(0, 1)
