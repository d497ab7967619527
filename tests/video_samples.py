"""Q, K and V of a video model: tokens of frames x height x width that attend to what is near in space and time.

Every channel pair of a head turns by an angle that is linear in the token's place, in Q and K alike, as in a rotary
embedding over three axes. With normal frequencies of deviation 1 / w their product falls off as a Gaussian of width w
tokens around the query's own place (random Fourier features: Rahimi, Recht 2007, theorem 1), one of HEIGHTS nats high.
The widths of the heads go from NARROWEST to WIDEST tokens. Normal noise of deviation NOISE on Q and K stands for what
tokens hold besides, and V is normal. Nothing here was fitted to a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lab.evaluation.samples import AttentionSample

HEIGHTS = (10.0, 16.0, 24.0)  # nats: flat, medium and sharp
NARROWEST, WIDEST = 1.5, 16.0
NOISE = 0.5


def video_samples(
    seed: int,
    *,
    frames: int,
    height: int,
    width: int,
    heads: int = 4,
    head_dim: int = 128,
    peaks: Sequence[float] = HEIGHTS,
) -> list[AttentionSample]:
    """A sample of one layer for each of `peaks`, the heights of the scores in nats.

    q, k and v are float16, (1, heads, tokens, head_dim). Tokens are counted along the width first and the frames
    last. head_dim is even.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = head_dim // 2
    axes = [torch.arange(size, dtype=torch.float32) for size in (frames, height, width)]
    places = torch.cartesian_prod(*axes)
    widths = torch.logspace(math.log10(NARROWEST), math.log10(WIDEST), heads)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    samples = []
    for layer, peak in enumerate(peaks):
        frequencies = normal(heads, 3, pairs) / widths[:, None, None]
        angles = places @ frequencies + 2 * math.pi * torch.rand(heads, 1, pairs, generator=generator)
        turned = torch.cat((angles.cos(), angles.sin()), dim=2)[None]
        turned *= math.sqrt(peak * math.sqrt(head_dim) / pairs)
        q, k = (turned + NOISE * normal(*turned.shape) for _ in range(2))
        samples.append(AttentionSample(layer, 0, q.half(), k.half(), normal(*turned.shape).half()))
    return samples
