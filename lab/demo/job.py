"""What the demo asks of a host, what it gets back, and the files of its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

FOLDER = Path(__file__).resolve().parents[1] / "models" / "demo"
# In FOLDER, in folders with ComfyUI's names.
DIT_FILE = "diffusion_models/demo_wan21_t2v_fp16.safetensors"
VAE_FILE = "vae/demo_wan21_vae_fp16.safetensors"
CAPTIONS_FILE = "text_encoders/demo_captions.safetensors"
CLASSIFIER_FILE = "demo_caption_classifier_fp16.safetensors"

FULL_PRECISION = "full precision"
MODES = ("precise", "8b", "4b")  # the one closest to full precision first
FPS = 8


@dataclass(frozen=True)
class Job:
    """One video to sample. frames: 1 more than a multiple of 4; width and height: multiples of 16."""

    caption: str = "a large orange spotted ball rolls over a drifting blue checkered floor"
    width: int = 256
    height: int = 256
    frames: int = 17
    steps: int = 16
    guidance: float = 4.0
    shift: float = 3.0
    seed: int = 3


@dataclass(frozen=True)
class Clip:
    """A sampled video.

    frames: (frames, height, width, 3) uint8.
    latent: (16, latent frames, height / 8, width / 8) float32, in the host's own scale.
    note: what the attention did, in words.
    """

    frames: torch.Tensor
    latent: torch.Tensor
    note: str


class Host(Protocol):
    """A host that can sample a job."""

    def sample(self, job: Job, mode: str, backend: str | None, progress: Callable[[float], None]) -> Clip:
        """Sample and decode the job's video.

        mode: FULL_PRECISION or one of MODES. backend: the attention backend; None takes the fastest that can run.
        progress: called with the share that is done, 0 to 1.
        """
