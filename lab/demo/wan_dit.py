"""The Wan 2.1 text-to-video diffusion transformer in plain PyTorch, for training and for evaluation.

Parameter names and shapes are those of Wan 2.1 checkpoints; patches are 1 x 2 x 2, heads have 128 channels and the
text enters by cross-attention. Under autocast matrix products are in its dtype; norms, gates and the residual stream
stay float32, as few passes over memory as eager PyTorch allows. The attention itself can be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

# q, k, v (batch, heads, tokens, HEAD_DIM) to an output of q's shape.
AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

HEAD_DIM = 128
_FREQUENCIES = 256
_PATCH = (1, 2, 2)
_LATENT_CHANNELS = 16
_EPS = 1e-6


@dataclass(frozen=True)
class DiTShape:
    """Sizes of a Wan transformer; ``dim`` is a multiple of HEAD_DIM."""

    dim: int
    ffn_dim: int
    layers: int
    text_dim: int = 4096


def rotary_table(frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Angles of the rotary embedding of a grid of patches: (frames * height * width, HEAD_DIM // 2) float32."""
    spatial = 2 * (HEAD_DIM // 6)
    axes = (HEAD_DIM - 2 * spatial, spatial, spatial)
    along = (torch.arange(count, device=device, dtype=torch.float64) for count in (frames, height, width))
    places = torch.cartesian_prod(*along)
    angles = []
    for place, channels in zip(places.unbind(1), axes, strict=True):
        rates = 10000.0 ** -(torch.arange(0, channels, 2, device=device, dtype=torch.float64) / channels)
        angles.append(place[:, None] * rates)
    return torch.cat(angles, dim=1).float()


def _rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate neighboring channel pairs of (batch, tokens, heads, HEAD_DIM); the result is float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # which has no code for complex numbers
        real, imaginary = pairs.unbind(-1)
        cos, sin = torch.view_as_real(turns).unbind(-1)
        return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2)
    return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2)


class WanAttention(nn.Module):
    """Attention with RMS-normalized queries and keys, of tokens to themselves or to a text.

    ``attend`` computes it, and may be replaced by any function of the same form.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps=_EPS), nn.RMSNorm(dim, eps=_EPS)  # over all heads together
        self.attend: AttentionFunction = F.scaled_dot_product_attention

    def forward(self, x: torch.Tensor, context: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.norm_q(self.q(x).float()), self.norm_k(self.k(context).float()), self.v(context)
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)) for t in (q, k, v))
        if turns is not None:
            q, k = _rotate(q, turns), _rotate(k, turns)
        out = self.attend(*(t.to(v.dtype).transpose(1, 2) for t in (q, k, v)))
        result: torch.Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


class WanBlock(nn.Module):
    """Self-attention, cross-attention to the text and a feed-forward net; the time gates the first and the last."""

    def __init__(self, shape: DiTShape):
        super().__init__()
        dim = shape.dim
        self.self_attn, self.cross_attn = WanAttention(dim), WanAttention(dim)
        self.norm3 = nn.LayerNorm(dim, eps=_EPS)
        self.ffn = nn.Sequential(nn.Linear(dim, shape.ffn_dim), nn.GELU("tanh"), nn.Linear(shape.ffn_dim, dim))
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, dim); time: (batch, 6, dim); text: (batch, words, dim); turns: (1, tokens, 1, 64)."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.modulation + time).chunk(6, dim=1)
        normed = _modulated(x, shift, scale).to(text.dtype)
        x = torch.addcmul(x, self.self_attn(normed, normed, turns), gate)
        x = x + self.cross_attn(self.norm3(x).to(text.dtype), text, None)
        normed = _modulated(x, ffn_shift, ffn_scale).to(text.dtype)
        return torch.addcmul(x, self.ffn(normed), ffn_gate)


def _modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=_EPS), 1 + scale)


class Head(nn.Module):
    """Tokens to patches of the predicted velocity."""

    def __init__(self, dim: int):
        super().__init__()
        self.head = nn.Linear(dim, math.prod(_PATCH) * _LATENT_CHANNELS)
        self.modulation = nn.Parameter(torch.zeros(1, 2, dim))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift, scale = (self.modulation + time.unsqueeze(1)).chunk(2, dim=1)
        result: torch.Tensor = self.head(_modulated(x, shift, scale))
        return result


class WanDiT(nn.Module):
    """Predicts the velocity (noise - latent) of a noisy latent."""

    def __init__(self, shape: DiTShape):
        super().__init__()
        dim = shape.dim
        self.patch_embedding = nn.Conv3d(_LATENT_CHANNELS, dim, _PATCH, stride=_PATCH)
        # A caption's vectors are far shorter than their number of channels suggests: see CaptionEncoder.
        from_text = nn.Linear(shape.text_dim, dim)
        self.text_embedding = nn.Sequential(from_text, nn.GELU("tanh"), nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(nn.Linear(_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        to_gates = nn.Linear(dim, 6 * dim)
        self.time_projection = nn.Sequential(nn.SiLU(), to_gates)
        blocks = [WanBlock(shape) for _ in range(shape.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.head = Head(dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(from_text.weight, std=0.2)
        # Every block starts as the identity: its gates, which time sets, and its cross-attention give zero.
        for last in (to_gates, self.head.head, *(block.cross_attn.o for block in blocks)):
            nn.init.zeros_(last.weight)

    @classmethod
    def load(cls, path: str | Path) -> WanDiT:
        """A model in float32 on the CPU from a checkpoint in Wan 2.1's format."""
        weights = {name: value.float() for name, value in load_file(path).items()}
        dim, text_dim = weights["text_embedding.0.weight"].shape
        layers = sum(name.endswith(".ffn.0.weight") for name in weights)
        model = cls(DiTShape(dim, len(weights["blocks.0.ffn.0.weight"]), layers, text_dim))
        model.load_state_dict(weights)
        return model.eval().requires_grad_(False)

    def attentions(self) -> list[tuple[WanAttention, WanAttention]]:
        """The self- and the cross-attention of each block, in order."""
        return [(block.self_attn, block.cross_attn) for block in self.blocks if isinstance(block, WanBlock)]

    def forward(self, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The velocity of a noisy latent, of the latent's shape.

        latent: (batch, 16, frames, height, width); timestep: (batch,) in [0, 1000]; text: (batch, words, text_dim).
        """
        x = self.patch_embedding(latent)
        frames, height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2).float().contiguous()
        time = self.time_embedding(_sinusoid(timestep))
        gates = self.time_projection(time).unflatten(1, (6, -1))
        text = self.text_embedding(text)
        angles = rotary_table(frames, height, width, latent.device)[None, :, None]
        turns = torch.polar(torch.ones_like(angles), angles)
        for block in self.blocks:
            x = block(x, gates, text, turns)
        patches = self.head(x, time).unflatten(2, (*_PATCH, -1)).unflatten(1, (frames, height, width))
        result: torch.Tensor = patches.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(latent.shape)
        return result


def _sinusoid(timestep: torch.Tensor) -> torch.Tensor:
    half = _FREQUENCIES // 2
    rates = 10000.0 ** -(torch.arange(half, device=timestep.device, dtype=torch.float32) / half)
    angles = timestep.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1)
