"""The demo model: its files, and how diffusers samples it.

Sampling runs in float32 on every device, so that two videos differ only by their attention: bfloat16 elsewhere would
by itself put two videos 36 dB apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .captions import CaptionEncoder
from .job import CAPTIONS_FILE, DIT_FILE, FOLDER, VAE_FILE

LATENT_CHANNELS = 16
_SCHEDULER: Any = FlowMatchEulerDiscreteScheduler
_SPACE, _TIME = 8, 4  # what the VAE divides sides and frames by

# q, k, v (B, H, N, D) to an output of q's shape.
Attend = Callable[..., torch.Tensor]


class ReplacedAttention(TorchFunctionMode):
    """Within a `with` block, another function computes the calls of torch's attention; `calls` counts them."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.calls = 0
        self._attend = attend

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        q, k, v = args if args else (kwargs[name] for name in ("query", "key", "value"))
        return self._attend(q, k, v)


class DemoModel:
    """The trained model on one device; `transformer` and `vae` are diffusers'."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.transformer = _load(
            WanTransformer3DModel, convert_wan_transformer_to_diffusers, DIT_FILE, device,
            num_attention_heads=2, ffn_dim=512, num_layers=5,
        )  # fmt: skip
        self.vae = _load(AutoencoderKLWan, convert_wan_vae_to_diffusers, VAE_FILE, device, base_dim=16)
        for weight in self.vae.parameters():  # on a CPU convolutions take half of the time with channels innermost
            if weight.ndim == 5:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
        self.encoder = CaptionEncoder.load(FOLDER / CAPTIONS_FILE)

    @torch.no_grad()
    def denoise(
        self,
        captions: Sequence[str],
        noise: torch.Tensor,
        *,
        steps: int,
        guidance: float = 4.0,
        shift: float = 3.0,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> torch.Tensor:
        """Turn noise (captions, 16, frames, height, width) into latents of the captions, by Euler steps.

        `before_step` is called with the number of each step.
        """
        scheduler = _SCHEDULER(shift=shift)
        scheduler.set_timesteps(sigmas=[1 - step / steps for step in range(steps)], device=self.device)
        latents = noise.to(self.device)
        encoded = torch.cat([self.encoder.encode(caption) for caption in captions]).to(self.device)
        text = torch.cat([encoded, torch.zeros_like(encoded)])
        for step, timestep in enumerate(scheduler.timesteps):
            before_step(step)
            both = torch.cat([latents, latents])
            velocity = self.transformer(both, timestep.expand(len(both)), text, return_dict=False)[0]
            with_text, without = velocity.chunk(2)
            velocity = without + guidance * (with_text - without)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return latents

    @torch.no_grad()
    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """A latent (16, frames, height, width) to a video (3, frames, height, width) in [-1, 1]."""
        mean, std = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        video: torch.Tensor = self.vae.decode(latent.to(self.device)[None] * std + mean, return_dict=False)[0][0]
        return video


def _load(kind: Any, convert: Any, file: str, device: torch.device, **sizes: int) -> Any:
    """A model of diffusers in float32, with the weights of a file in Wan's own format."""
    model = kind(**sizes)
    model.load_state_dict(convert({name: value.float() for name, value in load_file(FOLDER / file).items()}))
    return model.eval().requires_grad_(False).to(device)


def starting_noise(seed: int, *, width: int, height: int, frames: int) -> torch.Tensor:
    """(1, 16, 1 + (frames - 1) / 4, height / 8, width / 8) on the CPU; the same for a seed on every machine."""
    shape = (1, LATENT_CHANNELS, 1 + (frames - 1) // _TIME, height // _SPACE, width // _SPACE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pixels(video: torch.Tensor) -> torch.Tensor:
    """(3, frames, height, width) in [-1, 1] to (frames, height, width, 3) uint8."""
    return ((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()
