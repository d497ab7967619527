"""A random Wan 2.1 of a few megabytes: its pictures mean nothing, but every host loads and runs it as the real one.

Hosts recognize a checkpoint by its tensor names and shapes, so these two tables are the whole model. Fixed by the
format: text width 4096, 256 timestep frequencies, 16 latent channels, 1 x 2 x 2 patches and head_dim 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]

HEAD_DIM = 128
LATENT_CHANNELS = 16
PATCH = (1, 2, 2)
_TEXT_DIM, _FREQUENCIES = 4096, 256
_STAGE_WIDTHS = (1, 2, 4, 4)  # of the VAE, in multiples of its base width, at full resolution first
_TEMPORAL_STAGES = (1, 2)  # stages after which the VAE also halves the frames
_RESIDUALS = 2  # per encoder stage; the decoder has one more


def dit_shapes(dim: int = 2 * HEAD_DIM, ffn_dim: int = 512, layers: int = 2) -> Shapes:
    """Names and shapes of a Wan 2.1 text-to-video transformer with dim / 128 heads; `dim` is a multiple of 128."""
    if dim % HEAD_DIM:
        raise ValueError(f"dim must be a multiple of {HEAD_DIM}, the fixed head_dim of Wan 2.1, got {dim}")
    shapes: Shapes = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    shapes["patch_embedding.weight"], shapes["patch_embedding.bias"] = (dim, LATENT_CHANNELS, *PATCH), (dim,)
    linear("text_embedding.0", dim, _TEXT_DIM)
    linear("text_embedding.2", dim, dim)
    linear("time_embedding.0", dim, _FREQUENCIES)
    linear("time_embedding.2", dim, dim)
    linear("time_projection.1", 6 * dim, dim)
    for block in (f"blocks.{layer}" for layer in range(layers)):
        for attention in (f"{block}.self_attn", f"{block}.cross_attn"):
            for projection in "qkvo":
                linear(f"{attention}.{projection}", dim, dim)
            shapes[f"{attention}.norm_q.weight"] = shapes[f"{attention}.norm_k.weight"] = (dim,)
        shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (dim,)
        linear(f"{block}.ffn.0", ffn_dim, dim)
        linear(f"{block}.ffn.2", dim, ffn_dim)
        shapes[f"{block}.modulation"] = (1, 6, dim)
    linear("head.head", LATENT_CHANNELS * math.prod(PATCH), dim)
    shapes["head.modulation"] = (1, 2, dim)
    return shapes


class _VaeShapes:
    """Collects the VAE's table; convolutions are causal 3-D ones unless a kernel of two sizes says otherwise."""

    def __init__(self) -> None:
        self.shapes: Shapes = {}

    def conv(self, name: str, outputs: int, inputs: int, kernel: tuple[int, ...]) -> None:
        self.shapes[f"{name}.weight"], self.shapes[f"{name}.bias"] = (outputs, inputs, *kernel), (outputs,)

    def residual(self, name: str, inputs: int, outputs: int) -> None:
        self.shapes[f"{name}.residual.0.gamma"] = (inputs, 1, 1, 1)
        self.conv(f"{name}.residual.2", outputs, inputs, (3, 3, 3))
        self.shapes[f"{name}.residual.3.gamma"] = (outputs, 1, 1, 1)
        self.conv(f"{name}.residual.6", outputs, outputs, (3, 3, 3))
        if inputs != outputs:
            self.conv(f"{name}.shortcut", outputs, inputs, (1, 1, 1))

    def middle(self, name: str, width: int) -> None:
        self.residual(f"{name}.0", width, width)
        self.shapes[f"{name}.1.norm.gamma"] = (width, 1, 1)
        self.conv(f"{name}.1.to_qkv", 3 * width, width, (1, 1))
        self.conv(f"{name}.1.proj", width, width, (1, 1))
        self.residual(f"{name}.2", width, width)

    def head(self, name: str, width: int, outputs: int) -> None:
        self.shapes[f"{name}.0.gamma"] = (width, 1, 1, 1)
        self.conv(f"{name}.2", outputs, width, (3, 3, 3))

    def encoder(self, base: int) -> None:
        widths = [base * multiple for multiple in _STAGE_WIDTHS]
        numbers = _counting("encoder.downsamples")
        self.conv("encoder.conv1", base, 3, (3, 3, 3))
        inputs = base
        for stage, width in enumerate(widths):
            for _ in range(_RESIDUALS):
                self.residual(next(numbers), inputs, width)
                inputs = width
            if stage < len(widths) - 1:
                name = next(numbers)
                self.conv(f"{name}.resample.1", width, width, (3, 3))
                if stage in _TEMPORAL_STAGES:
                    self.conv(f"{name}.time_conv", width, width, (3, 1, 1))
        self.middle("encoder.middle", inputs)
        self.head("encoder.head", inputs, 2 * LATENT_CHANNELS)

    def decoder(self, base: int) -> None:
        widths = [base * multiple for multiple in reversed(_STAGE_WIDTHS)]
        numbers = _counting("decoder.upsamples")
        inputs = widths[0]
        self.conv("decoder.conv1", inputs, LATENT_CHANNELS, (3, 3, 3))
        self.middle("decoder.middle", inputs)
        for stage, width in enumerate(widths):
            for _ in range(_RESIDUALS + 1):
                self.residual(next(numbers), inputs, width)
                inputs = width
            if stage < len(widths) - 1:
                name = next(numbers)
                self.conv(f"{name}.resample.1", width // 2, width, (3, 3))
                if len(widths) - 2 - stage in _TEMPORAL_STAGES:
                    self.conv(f"{name}.time_conv", 2 * width, width, (3, 1, 1))
                inputs = width // 2
        self.head("decoder.head", inputs, 3)


def _counting(prefix: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{prefix}.{number}"
        number += 1


def vae_shapes(base: int = 8) -> Shapes:
    """Names and shapes of a Wan 2.1 VAE with `base` channels at full resolution (Wan's own has 96)."""
    table = _VaeShapes()
    table.encoder(base)
    table.conv("conv1", 2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, (1, 1, 1))
    table.conv("conv2", LATENT_CHANNELS, LATENT_CHANNELS, (1, 1, 1))
    table.decoder(base)
    return table.shapes


def random_weights(
    shapes: Shapes, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float16
) -> dict[str, torch.Tensor]:
    """Weights that keep the variance: ones for norms, small biases, the rest normal over the fan-in."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".gamma") or ("norm" in name and name.endswith(".weight")):
            return torch.ones(shape, device=device)
        if name.endswith(".bias"):
            return 0.02 * normal(shape)
        fan_in = shape[-1] if name.endswith("modulation") else math.prod(shape[1:])
        return normal(shape) / math.sqrt(fan_in)

    return {name: value(name, shape).to(dtype) for name, shape in shapes.items()}


def write_checkpoint(path: Path, shapes: Shapes, seed: int) -> None:
    """Save random weights of these shapes as safetensors, making the folder when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(shapes, seed), path, metadata={"format": "pt"})
