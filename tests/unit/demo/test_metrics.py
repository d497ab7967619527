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


def test_ssim_of_an_offset_is_its_luminance_term() -> None:
    dark, light = torch.full((1, 16, 16, 3), 100, dtype=torch.uint8), torch.full((1, 16, 16, 3), 110, dtype=torch.uint8)
    c1 = (0.01 * 255) ** 2
    assert ssim(dark, light) == pytest.approx((2 * 100 * 110 + c1) / (100**2 + 110**2 + c1))


def test_ssim_falls_with_noise(video: torch.Tensor) -> None:
    noise = torch.randint(0, 9, video.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert ssim(video + 5 * (noise // 8), video) > ssim(video + noise, video)


def test_ssim_needs_room_for_its_window() -> None:
    small = torch.zeros(1, 10, 10, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="at least 11 x 11"):
        ssim(small, small)
