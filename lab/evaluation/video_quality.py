"""How good a sampled video is, by itself and beside the one of full precision."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn

from comfy_sage2.metrics import Agreement

from ..demo.metrics import psnr, ssim
from ..demo.sampler import half_precision
from ..demo.wan_vae import WanVAE


@dataclass(frozen=True)
class VideoQuality:
    """Against full precision: psnr in dB, ssim, vae_distance, latent_cosine. By itself: flicker in gray levels."""

    psnr: float
    ssim: float
    vae_distance: float
    latent_cosine: float
    flicker: float

    @classmethod
    def mean(cls, results: list[VideoQuality]) -> VideoQuality:
        """The mean of each number over several videos."""
        return cls(*(sum(getattr(r, field.name) for r in results) / len(results) for field in fields(cls)))


def flicker(frames: torch.Tensor) -> float:
    """Mean |x(t+1) - 2 x(t) + x(t-1)| over all pixels of uint8 frames: what jumps back and forth, not what moves on."""
    levels = frames.float()
    return (levels[2:] - 2 * levels[1:-1] + levels[:-2]).abs().mean().item()


class FeatureDistance:
    """A perceptual distance by the features of the VAE's encoder, as LPIPS takes those of a classifier.

    After each resolution's residual blocks features are scaled to unit length over the channels; the distance is the
    squared difference, summed over channels, averaged over positions and resolutions. 0 for equal videos, at most 4.
    """

    def __init__(self, vae: WanVAE) -> None:
        self._encoder = vae.encoder
        layers = list(self._encoder.downsamples)
        self._last = [i for i, layer in enumerate(layers) if _ends_resolution(layers, i, layer)]

    @torch.no_grad()
    def features(self, video: torch.Tensor) -> list[torch.Tensor]:
        """Of a video (3, frames, height, width) in [-1, 1] on the VAE's device."""
        found = []
        with half_precision(video.device):
            x = self._encoder.conv1(video[None])
            for index, layer in enumerate(self._encoder.downsamples):
                x = layer(x)
                if index in self._last:
                    found.append(nn.functional.normalize(x.float(), dim=1))
        return found

    @staticmethod
    def between(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
        """The distance of two videos of one shape by their features."""
        distances = [(a - b).square().sum(dim=1).mean().item() for a, b in zip(ours, theirs, strict=True)]
        return sum(distances) / len(distances)


def _ends_resolution(layers: list[nn.Module], index: int, layer: nn.Module) -> bool:
    following = layers[index + 1] if index + 1 < len(layers) else None
    return following is None or (type(following) is not type(layer) and hasattr(following, "time_conv"))


def compare(
    frames: torch.Tensor,
    full_frames: torch.Tensor,
    vae_distance: float,
    latent: torch.Tensor,
    full_latent: torch.Tensor,
) -> VideoQuality:
    """Compare frames (frames, height, width, 3) uint8 and their latent with those of full precision."""
    return VideoQuality(
        psnr=psnr(frames, full_frames),
        ssim=ssim(frames, full_frames),
        vae_distance=vae_distance,
        latent_cosine=Agreement.of(latent, full_latent).cosine,
        flicker=flicker(frames),
    )
