"""Q, K and V with the outlier structure that the paper shows (figure of the heatmaps, sections 3.1 and 3.4).

Every tensor is a sum of what its tokens share and what distinguishes them:

* Q and K: an offset of each channel, the same for all tokens. It is normal with deviation 1, and OUTLIERS channels of
  each head have one of OUTLIER_RANGE instead, of either sign: those are the vertical lines of the heatmaps.
* Q: neighboring tokens are alike. A random walk over blocks of WALK_TOKENS tokens adds a part of deviation 1 to every
  channel, so that the means of Q's blocks differ.
* V: an offset of each channel, normal with deviation V_OFFSET; in every third layer BIASED_CHANNELS channels have one
  between 8 and 9 more, as section 3.4 reports of one model.
* All: independent normal noise of deviation 1. Q and K are then scaled alike, so that noise and walk together give the
  scores a deviation of SHARPNESS.

Nothing here was fitted to a result. Layers differ only by their seed.
"""

from __future__ import annotations

import math

import torch

from .samples import AttentionSample

OUTLIERS, OUTLIER_RANGE = 6, (6.0, 14.0)
WALK_TOKENS = 64
V_OFFSET, BIASED_CHANNELS, BIAS_EVERY = 0.5, 8, 3
SHARPNESS = 2.0


def synthetic_samples(
    seed: int, *, layers: int, tokens: int, heads: int = 2, head_dim: int = 128
) -> list[AttentionSample]:
    """One sample of ``layers`` layers; the same arguments give the same tensors on every machine, float16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, tokens, head_dim)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    def offsets() -> torch.Tensor:
        offset = normal(1, heads, 1, head_dim)
        for head in range(heads):
            channels = torch.randperm(head_dim, generator=generator)[:OUTLIERS]
            low, high = OUTLIER_RANGE
            size = low + (high - low) * torch.rand(OUTLIERS, generator=generator)
            offset[0, head, 0, channels] = size * normal(OUTLIERS).sign()
        return offset

    def walk() -> torch.Tensor:
        steps = normal(1, heads, math.ceil(tokens / WALK_TOKENS), head_dim).cumsum(dim=2)
        steps = (steps - steps.mean(dim=2, keepdim=True)) / steps.std(dim=2, keepdim=True).clamp(min=1e-3)
        return steps.repeat_interleave(WALK_TOKENS, dim=2)[:, :, :tokens]

    samples = []
    for layer in range(layers):
        gain = math.sqrt(SHARPNESS / math.sqrt(2))  # Q's noise and walk have variance 2 together
        q = (normal(*shape) + walk() + offsets()) * gain
        k = (normal(*shape) + offsets()) * gain
        v = normal(*shape) + V_OFFSET * normal(1, heads, 1, head_dim)
        if layer % BIAS_EVERY == BIAS_EVERY - 1:
            v[..., :BIASED_CHANNELS] += 8 + torch.rand(BIASED_CHANNELS, generator=generator)
        samples.append(AttentionSample(layer, 0, q.half(), k.half(), v.half()))
    return samples
