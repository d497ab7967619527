"""A Wan 2.1 of a few megabytes with random weights: its images are noise, but every host runs it like the real one.

Hosts recognize a checkpoint by its tensor names and shapes, so this table is the whole model. The format fixes the text
width (4096), 256 timestep frequencies, 16 latent channels, 1 x 2 x 2 patches and head_dim 128.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]

HEAD_DIM = 128
LATENT_CHANNELS = 16
PATCH = (1, 2, 2)
_TEXT_DIM, _FREQUENCIES = 4096, 256


def dit_shapes(dim: int = 2 * HEAD_DIM, ffn_dim: int = 512, layers: int = 2) -> Shapes:
    """Names and shapes of a Wan 2.1 text-to-video transformer with dim / 128 heads; `dim` is a multiple of 128."""
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


def random_weights(
    shapes: Shapes, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float16
) -> dict[str, torch.Tensor]:
    """Weights that preserve the variance: ones for norms, small biases, the rest Gaussian, scaled by the fan-in."""
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
    """Save random weights of these shapes as safetensors, and create the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(shapes, seed), path, metadata={"format": "pt"})
