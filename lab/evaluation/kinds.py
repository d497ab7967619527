"""Six kinds of Q, K and V that attention has been seen with, from harmless to built against one method."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from comfy_sage2.quantize.rotation import rotate, rotation_size

from .synthetic import synthetic_samples

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int]  # heads, tokens, head_dim

_LOUD_CHANNELS, _SHARE = 4, 0.93  # of K's energy, as captured of MiniMax H3's rotary channels
_WORST_CHANNELS, _WORST_SIZE = 4, 8.0


def gaussian(shape: Shape, generator: torch.Generator) -> Tensors:
    """Independent normal numbers."""
    q, k, v = (torch.randn(1, *shape, generator=generator) for _ in range(3))
    return q, k, v


def outliers(shape: Shape, generator: torch.Generator) -> Tensors:
    """Channels with a large offset, as `synthetic` has them."""
    heads, tokens, head_dim = shape
    seed = int(torch.randint(1 << 30, (1,), generator=generator))
    (sample,) = synthetic_samples(seed, layers=1, tokens=tokens, heads=heads, head_dim=head_dim)
    return sample.q.float(), sample.k.float(), sample.v.float()


def video(shape: Shape, generator: torch.Generator) -> Tensors:
    """Channels that change smoothly from token to token, with a little noise."""
    heads, tokens, head_dim = shape

    def smooth() -> torch.Tensor:
        frequency, phase = torch.rand(2, 1, heads, 1, head_dim, generator=generator)
        angle = 2 * math.pi * ((0.5 + 6 * frequency) * torch.arange(tokens)[:, None] / tokens + phase)
        noise = 0.1 * torch.randn(1, *shape, generator=generator)
        smooth_part: torch.Tensor = math.sqrt(2) * angle.sin()
        return noise + smooth_part

    return smooth(), smooth(), smooth()


def sink(shape: Shape, generator: torch.Generator) -> Tensors:
    """Gaussian, and a first key that every query attends to."""
    q, k, v = gaussian(shape, generator)
    direction = torch.nn.functional.normalize(torch.randn(1, shape[0], 1, shape[2], generator=generator), dim=3)
    size = math.sqrt(shape[2])
    k[:, :, :1] = 1.5 * size * direction
    return q + 0.5 * size * direction, k, v


def loud_rotary_pairs(shape: Shape, generator: torch.Generator) -> Tensors:
    """Two rotary pairs of K hold nearly all of its energy, as in MiniMax H3."""
    q, k, v = gaussian(shape, generator)
    head_dim = shape[2]
    factor = math.sqrt(_SHARE / (1 - _SHARE) * (head_dim - _LOUD_CHANNELS) / _LOUD_CHANNELS)
    k[..., [5, 5 + head_dim // 2, 9, 9 + head_dim // 2]] *= factor
    return q, k / k.std(), v


def worst_for_rotation(shape: Shape, generator: torch.Generator) -> Tensors:
    """Four channels of K are loud once it is rotated."""
    q, _, v = gaussian(shape, generator)
    size = rotation_size(shape[2])
    rotated = torch.randn(1, *shape[:2], size, generator=generator)
    rotated[..., :_WORST_CHANNELS] *= _WORST_SIZE
    back = rotate(torch.eye(shape[2])).T / math.sqrt(size)
    return q, rotated @ back, v


KINDS: dict[str, Callable[[Shape, torch.Generator], Tensors]] = {
    "Gaussian": gaussian,
    "outlier channels": outliers,
    "video-like": video,
    "one sink": sink,
    "MiniMax H3-like": loud_rotary_pairs,
    "worst for rotation": worst_for_rotation,
}


def inputs(kind: str, shape: Shape, seed: int) -> Tensors:
    """Q, K and V (1, heads, tokens, head_dim) float32 with bf16's numbers; the same arguments give the same."""
    q, k, v = (tensor.bfloat16().float() for tensor in KINDS[kind](shape, torch.Generator().manual_seed(seed)))
    return q, k, v
