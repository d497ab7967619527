"""The Wan 2.1 video VAE (8x in space, 4x in time, 16 latent channels) in plain PyTorch, for training and evaluation.

Parameter names and shapes are those of Wan 2.1 checkpoints. Where inference code walks through a video in chunks with
caches, this one takes the whole video at once; both compute the same function, because every convolution over time is
causal and the first frame stands alone. Videos have 1 + 4 n frames.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

LATENT_CHANNELS = 16
_WIDTHS = (1, 2, 4, 4)
_RESIDUAL_BLOCKS = 2
_HALVES_TIME = (False, True, True)


class CausalConv3d(nn.Conv3d):
    """A 3-D convolution that sees no later frame: (batch, channels, frames, height, width)."""

    bias: nn.Parameter

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int, int]):
        size = (kernel,) * 3 if isinstance(kernel, int) else kernel
        super().__init__(inputs, outputs, size, padding=(0, size[1] // 2, size[2] // 2))
        self.frames_before = size[0] - 1

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        if self.frames_before:
            video = F.pad(video, (0, 0, 0, 0, self.frames_before, 0))
        return super().forward(video)


def _normalize(features: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalization over the channels, the second axis."""
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True, dtype=torch.float32).clamp(min=1e-12)
    scale = features.shape[1] ** 0.5 / length
    result: torch.Tensor = features * scale.to(features.dtype) * gamma.to(features.dtype)
    return result


class RMSNorm(nn.Module):
    """Holds the gain of a normalization over the channels."""

    def __init__(self, channels: int, spatial_axes: int = 3):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * spatial_axes))


class NormSiLUConv(nn.Sequential):
    """Normalization, SiLU and a causal 3x3x3 convolution, at the positions where Wan has them."""

    def __init__(self, inputs: int, outputs: int):
        norm, conv = RMSNorm(inputs), CausalConv3d(inputs, outputs, 3)
        super().__init__(norm, nn.SiLU(), conv)
        self._pair = (norm, conv)  # in a tuple, so that nothing is registered twice

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return _norm_silu_conv(*self._pair, features)


def _norm_silu_conv(norm: RMSNorm, conv: CausalConv3d, features: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = conv(F.silu(_normalize(features, norm.gamma)))
    return result


class ResidualBlock(nn.Module):
    """Two convolutions with normalization, added to their input."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        first = (RMSNorm(inputs), CausalConv3d(inputs, outputs, 3))
        second = (RMSNorm(outputs), CausalConv3d(outputs, outputs, 3))
        nn.init.zeros_(second[1].weight)  # the block starts as its shortcut
        # SiLU and (inactive) dropout keep their positions: positions are part of parameter names.
        self.residual = nn.Sequential(
            *(first[0], nn.SiLU(), first[1]), *(second[0], nn.SiLU(), nn.Identity(), second[1])
        )
        self.shortcut = CausalConv3d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self._pairs = (first, second)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        inner = features
        for norm, conv in self._pairs:
            inner = _norm_silu_conv(norm, conv, inner)
        result: torch.Tensor = self.shortcut(features) + inner
        return result


class AttentionBlock(nn.Module):
    """Single-head attention within each frame."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = RMSNorm(channels, spatial_axes=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        frames, shape = _frames_to_batch(features), features.shape
        qkv = self.to_qkv(_normalize(frames, self.norm.gamma)).flatten(2).transpose(1, 2).unsqueeze(1)
        attended = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1))
        attended = attended.squeeze(1).transpose(1, 2).reshape(frames.shape)
        return features + _batch_to_frames(self.proj(attended), shape[0])


# Resampling starts as averaging and copying: with random resampling a VAE takes long to pass anything on.
_RANDOM_SHARE = 0.2


class Downsample(nn.Module):
    """Halves height and width, and the frames after the first if asked."""

    def __init__(self, channels: int, halves_time: bool):
        super().__init__()
        conv = nn.Conv2d(channels, channels, 3, stride=2)
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv)
        self.time_conv = nn.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if halves_time else None
        channel = torch.arange(channels)
        with torch.no_grad():
            conv.weight.mul_(_RANDOM_SHARE)[channel, channel, :2, :2] += 0.4
            if self.time_conv is not None:
                self.time_conv.weight.mul_(_RANDOM_SHARE)[channel, channel] += 0.4

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = _batch_to_frames(self.resample(_frames_to_batch(features)), len(features))
        if self.time_conv is not None and features.shape[2] > 1:
            features = torch.cat([features[:, :, :1], self.time_conv(features)], dim=2)
        return features


class Upsample(nn.Module):
    """Doubles height and width, and the frames after the first if asked; halves the channels."""

    def __init__(self, channels: int, doubles_time: bool):
        super().__init__()
        conv = nn.Conv2d(channels, channels // 2, 3, padding=1)
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest-exact"), conv)
        self.time_conv = CausalConv3d(channels, 2 * channels, (3, 1, 1)) if doubles_time else None
        half, twice = torch.arange(channels // 2), torch.arange(2 * channels)
        with torch.no_grad():
            conv.weight.mul_(_RANDOM_SHARE)
            for neighbor in (0, 1):
                conv.weight[half, 2 * half + neighbor, 1, 1] += 0.7
            if self.time_conv is not None:
                self.time_conv.weight.mul_(_RANDOM_SHARE)[twice, twice % channels, -1] += 1

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.time_conv is not None and features.shape[2] > 1:
            # The first frame neither is doubled nor seen by the others.
            early, late = self.time_conv(features[:, :, 1:]).chunk(2, dim=1)
            doubled = torch.stack([early, late], dim=3).flatten(2, 3)
            features = torch.cat([features[:, :, :1], doubled], dim=2)
            features = features.contiguous(memory_format=torch.channels_last_3d)
        return _batch_to_frames(self.resample(_frames_to_batch(features)), len(features))


def _frames_to_batch(video: torch.Tensor) -> torch.Tensor:
    return video.transpose(1, 2).flatten(0, 1)


def _batch_to_frames(frames: torch.Tensor, batch: int) -> torch.Tensor:
    result: torch.Tensor = frames.unflatten(0, (batch, -1)).transpose(1, 2)
    return result


def _middle(channels: int) -> nn.Sequential:
    return nn.Sequential(ResidualBlock(channels, channels), AttentionBlock(channels), ResidualBlock(channels, channels))


class Encoder(nn.Module):
    """Video to the mean and log variance of its latent, before the last 1x1x1 convolution."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1 = CausalConv3d(3, dim, 3)
        layers: list[nn.Module] = []
        channels = dim
        for stage, width in enumerate(_WIDTHS):
            for _ in range(_RESIDUAL_BLOCKS):
                layers.append(ResidualBlock(channels, width * dim))
                channels = width * dim
            if stage < len(_HALVES_TIME):
                layers.append(Downsample(channels, _HALVES_TIME[stage]))
        self.downsamples = nn.Sequential(*layers)
        self.middle = _middle(channels)
        self.head = NormSiLUConv(channels, 2 * LATENT_CHANNELS)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.middle(self.downsamples(self.conv1(video))))
        return result


class Decoder(nn.Module):
    """Latent to video."""

    def __init__(self, dim: int):
        super().__init__()
        channels = _WIDTHS[-1] * dim
        self.conv1 = CausalConv3d(LATENT_CHANNELS, channels, 3)
        self.middle = _middle(channels)
        layers: list[nn.Module] = []
        for stage, width in enumerate(reversed(_WIDTHS)):
            for _ in range(_RESIDUAL_BLOCKS + 1):
                layers.append(ResidualBlock(channels, width * dim))
                channels = width * dim
            if stage < len(_HALVES_TIME):
                layers.append(Upsample(channels, _HALVES_TIME[::-1][stage]))
                channels //= 2
        self.upsamples = nn.Sequential(*layers)
        self.head = NormSiLUConv(channels, 3)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.upsamples(self.middle(self.conv1(latent))))
        return result


class WanVAE(nn.Module):
    """The whole VAE. ``dim`` is the number of channels at full resolution (96 in Wan 2.1 itself)."""

    def __init__(self, dim: int):
        super().__init__()
        self.encoder = Encoder(dim)
        self.conv1 = CausalConv3d(2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, 1)
        self.conv2 = CausalConv3d(LATENT_CHANNELS, LATENT_CHANNELS, 1)
        self.decoder = Decoder(dim)
        for conv in self._convolutions():  # they are fastest with channels innermost
            channels_last = torch.channels_last if conv.weight.ndim == 4 else torch.channels_last_3d
            conv.weight.data = conv.weight.data.contiguous(memory_format=channels_last)

    @classmethod
    def load(cls, path: str | Path) -> WanVAE:
        """A model in float32 on the CPU from a VAE in Wan 2.1's format."""
        weights = {name: value.float() for name, value in load_file(path).items()}
        model = cls(len(weights["decoder.head.0.gamma"]))
        model.load_state_dict(weights)
        return model.eval().requires_grad_(False)

    def _convolutions(self) -> list[nn.Conv2d | nn.Conv3d]:
        return [module for module in self.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))]

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 1 + 4 n, height, width) in [-1, 1] to the latent's mean (batch, 16, 1 + n, height/8, width/8)."""
        result: torch.Tensor = self.conv1(self.encoder(video))[:, :LATENT_CHANNELS]
        return result

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`encode`."""
        result: torch.Tensor = self.decoder(self.conv2(latent))
        return result
