"""Q, K and V of the demo model's self-attention, taken while it samples."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from ..demo.captions import CaptionEncoder
from ..demo.sampler import denoise, starting_noise
from ..demo.wan_dit import WanDiT
from .samples import AttentionSample

CAPTION = "a large red striped ball bounces and a white star spins over a drifting blue checkered floor"


def demo_samples(
    dit: WanDiT,
    encoder: CaptionEncoder,
    *,
    seed: int,
    steps: int,
    every_step: int,
    side: int = 256,
    frames: int = 33,
    progress: Callable[[float], None] = lambda share: None,
) -> list[AttentionSample]:
    """Sample one video and keep every layer's self-attention in every ``every_step``-th step, from the second on.

    The kept batch row is the one with the caption.
    """
    samples: list[AttentionSample] = []
    now = 0

    def before_step(step: int) -> None:
        nonlocal now
        now = step
        progress(step / steps)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if now % every_step == 1 % every_step:
            samples.append(AttentionSample(layer, now, q[:1].cpu(), k[:1].cpu(), v[:1].cpu()))
        return F.scaled_dot_product_attention(q, k, v)

    for layer, (self_attention, _) in enumerate(dit.attentions()):
        self_attention.attend = functools.partial(attend, layer)
    noise = starting_noise(seed, width=side, height=side, frames=frames)
    denoise(dit, encoder, [CAPTION], noise, steps=steps, before_step=before_step)
    for self_attention, _ in dit.attentions():
        self_attention.attend = F.scaled_dot_product_attention
    return samples
