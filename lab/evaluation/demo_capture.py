"""Q, K and V of the demo model's self-attention, taken while it samples."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from ..capture.recorder import CaptureBounds, Recorder
from ..capture.samples import AttentionSample
from ..demo.captions import CaptionEncoder
from ..demo.sampler import denoise, starting_noise
from ..demo.wan_dit import WanDiT

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
    recorder = Recorder(CaptureBounds(every_layer=1, every_step=every_step))
    now = 0

    def before_step(step: int) -> None:
        nonlocal now
        now = step
        progress(step / steps)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if recorder.wants(layer, now - 1):
            recorder.add(q, k, v, layer=layer, step=now)
        return F.scaled_dot_product_attention(q, k, v)

    for layer, (self_attention, _) in enumerate(dit.attentions()):
        self_attention.attend = functools.partial(attend, layer)
    noise = starting_noise(seed, width=side, height=side, frames=frames)
    denoise(dit, encoder, [CAPTION], noise, steps=steps, before_step=before_step)
    for self_attention, _ in dit.attentions():
        self_attention.attend = F.scaled_dot_product_attention
    return recorder.samples
