"""The demo without ComfyUI: the same checkpoint in diffusers, patched through the public API."""

from __future__ import annotations

from collections.abc import Callable

import torch

from comfy_sage2.integrations.diffusers import patch

from .job import FULL_PRECISION, Clip, Job
from .model import DemoModel, pixels, starting_noise


class DiffusersHost:
    """Samples with diffusers' Wan 2.1."""

    def __init__(self) -> None:
        self._model = DemoModel(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def sample(self, job: Job, mode: str, backend: str | None, progress: Callable[[float], None]) -> Clip:
        """As `Host.sample`."""
        noise = starting_noise(job.seed, width=job.width, height=job.height, frames=job.frames)

        def latents() -> torch.Tensor:
            return self._model.denoise(
                [job.caption], noise, steps=job.steps, guidance=job.guidance, shift=job.shift,
                before_step=lambda step: progress(step / job.steps),
            )  # fmt: skip

        if mode == FULL_PRECISION:
            latent, note = latents()[0], "diffusers' own attention"
        else:
            with patch(self._model.transformer, mode=mode, when="always", backend=backend) as patched:
                latent = latents()[0]
            note = patched.summary()
        return Clip(pixels(self._model.decode(latent)).cpu(), latent.cpu(), note)
