"""What the demo asks of a host, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..baselines import BASELINES

FULL_PRECISION = "full precision"
VARIANTS = (FULL_PRECISION, "8b", "4b", *BASELINES)
BASELINE_NOTE = "a baseline of the paper, by reference numerics"
FPS = 8

Progress = Callable[[float], None]  # takes the share that is done, 0 to 1


@dataclass(frozen=True)
class Job:
    """One video to sample; each variant of the attention gets the same one.

    backend: name of the attention backend for 8b and 4b; None picks the fastest that can run.
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

    name: str

    def sample(self, job: Job, variant: str, progress: Progress) -> Clip:
        """Sample and decode the job's video with one of VARIANTS."""
