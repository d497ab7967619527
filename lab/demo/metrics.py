"""How far a video is from another one."""

from __future__ import annotations

import math

import torch

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def psnr(video: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB over all of two uint8 videos of one shape; infinite when they are equal."""
    error = (video.double() - reference.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def ssim(video: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean structural similarity (Wang et al. 2004) of two uint8 videos (frames, height, width, 3).

    A Gaussian window of 11 x 11 pixels with sigma 1.5, for each color channel by itself, only where the window fits.
    """
    if min(video.shape[1:3]) < _WINDOW:
        raise ValueError(f"SSIM needs frames of at least {_WINDOW} x {_WINDOW} pixels, got {tuple(video.shape[1:3])}")
    if torch.equal(video, reference):  # as in the demo's first row
        return 1.0
    x, y = (v.double().permute(0, 3, 1, 2).flatten(0, 1)[:, None] for v in (video, reference))
    rows, columns = (_blurring(length).to(x.device) for length in x.shape[2:])

    def blur(picture: torch.Tensor) -> torch.Tensor:
        return rows @ picture @ columns.T

    mean_x, mean_y = blur(x), blur(y)
    variance_x, variance_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * 255) ** 2, (_K2 * 255) ** 2
    likeness = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return (likeness / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))).mean().item()


def _blurring(length: int) -> torch.Tensor:
    """The Gaussian window at each position where it fits into `length` pixels, float64 (positions, length).

    A product with it takes a quarter of the time that a convolution in float64 takes on a CPU.
    """
    distances = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    weights = torch.exp(-distances.square() / (2 * _SIGMA**2))
    matrix = torch.zeros(length - _WINDOW + 1, length, dtype=torch.float64)
    for offset, weight in enumerate(weights / weights.sum()):
        matrix.diagonal(offset).fill_(weight)
    return matrix
