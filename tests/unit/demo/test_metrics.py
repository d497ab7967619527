"""Known values of the video metrics."""

from __future__ import annotations

import math

import pytest
import torch

from lab.demo.metrics import psnr, ssim


@pytest.fixture
def video() -> torch.Tensor:
    return torch.randint(0, 245, (3, 32, 24, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_equal_videos(video: torch.Tensor) -> None:
    assert psnr(video, video) == math.inf
    assert ssim(video, video) == pytest.approx(1)


def test_psnr_of_a_constant_offset(video: torch.Tensor) -> None:
    assert psnr(video + 10, video) == pytest.approx(20 * math.log10(255 / 10))


def test_ssim_is_the_mean_over_all_windows(video: torch.Tensor) -> None:
    """The reference goes window by window, as in the paper; the frames are not square."""
    other = (video.double() * 0.7 + 30).to(torch.uint8).flip(1)
    gaussian = [math.exp(-(offset**2) / 4.5) for offset in range(-5, 6)]
    total = sum(gaussian) ** 2
    weights = torch.tensor([[a * b / total for b in gaussian] for a in gaussian], dtype=torch.float64)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    windows = []
    for top in range(32 - 10):
        for left in range(24 - 10):
            x, y = (v[:, top : top + 11, left : left + 11].double() for v in (video, other))
            w = weights[None, :, :, None]
            mean_x, mean_y = (w * x).sum((1, 2)), (w * y).sum((1, 2))
            centered_x, centered_y = x - mean_x[:, None, None], y - mean_y[:, None, None]
            variances = (w * centered_x**2).sum((1, 2)) + (w * centered_y**2).sum((1, 2))
            covariance = (w * centered_x * centered_y).sum((1, 2))
            similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
            windows.append(similarity / ((mean_x**2 + mean_y**2 + c1) * (variances + c2)))
    assert ssim(video, other) == pytest.approx(torch.stack(windows).mean().item(), abs=1e-12)
