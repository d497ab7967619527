"""What the demo asks of a host, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..baselines import BASELINES

FULL_PRECISION = "full precision"
MODES = ("precise", "8b", "4b")  # the closest one first
BASELINE_NOTE = "a baseline of the paper, by reference numerics"
PURPOSES = {
    FULL_PRECISION: "nothing is quantized: what the others are compared with",
    "precise": "Q and K in INT8, P and V in 16 bits: closest to full precision",
    "8b": "Q and K in INT8, P and V in FP8: close to full precision",
    "4b": "Q and K in INT4, P and V in FP8: fewer bits, for GPUs with INT4 tensor cores",
} | {name: "a baseline of the paper, for comparison" for name in BASELINES}
FPS = 8

Progress = Callable[[float], None]  # takes the share that is done, 0 to 1


@dataclass(frozen=True)
class Job:
    """One video to sample; each variant of the attention gets the same one.

    backend: name of the attention backend for MODES; None picks the fastest that can run.
    frames: 1 more than a multiple of 4; width and height: multiples of 16.
    """

    caption: str
    width: int
    height: int
    frames: int
    steps: int
    guidance: float
    shift: float
    seed: int
    backend: str | None


@dataclass(frozen=True)
class Clip:
    """A sampled video.

    frames: (frames, height, width, 3) uint8.
    latent: (16, latent frames, height / 8, width / 8) float32, in the host's own scale.
    seconds: from the request to the decoded frames. note: what the attention did, for a person.
    """

    variant: str
    frames: torch.Tensor
    latent: torch.Tensor
    seconds: float
    note: str


class Host(Protocol):
    """What can sample a job."""

    def sample(self, job: Job, variant: str, progress: Progress) -> Clip:
        """Sample and decode the job's video with the attention `variant`, one of PURPOSES."""
