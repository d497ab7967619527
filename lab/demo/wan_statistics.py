"""What Wan's hosts subtract from the VAE's latents and divide them by, channel by channel."""

from __future__ import annotations

import torch

WAN_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
WAN_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


def _per_channel(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype).view(1, -1, 1, 1, 1)


def normalized(latent: torch.Tensor) -> torch.Tensor:
    """VAE latent (batch, 16, frames, height, width) to what the diffusion model sees."""
    return (latent - _per_channel(WAN_MEAN, latent)) / _per_channel(WAN_STD, latent)


def denormalized(latent: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`normalized`."""
    return latent * _per_channel(WAN_STD, latent) + _per_channel(WAN_MEAN, latent)
