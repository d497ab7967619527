"""From a trained VAE to the latents that the diffusion model is trained on.

Wan's hosts subtract fixed means from the VAE's latents and divide them by fixed deviations. The VAE's outermost 1x1x1
convolutions are changed, without changing what it computes, so that its latents have just these statistics; the
diffusion model then sees latents of mean 0 and deviation 1.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...demo.captions import CAPTION_LENGTH, CaptionEncoder
from ...demo.sampler import half_precision
from ...demo.scenes import random_scene
from ...demo.wan_statistics import WAN_MEAN, WAN_STD, normalised
from ...demo.wan_vae import WanVAE
from . import clips

Encode = Callable[[torch.Tensor], torch.Tensor]  # a VAE's method of that name, compiled or not


@torch.no_grad()
def encode_clips(encode: Encode, scenes: clips.SceneBatch) -> torch.Tensor:
    """Draw and encode: (batch, 16, 9, 32, 32)."""
    video = clips.whole_clips(scenes)
    with half_precision(video.device):
        return encode(video).float()


@torch.no_grad()
def give_wan_statistics(model: WanVAE, noise: float, seed: int, clip_count: int) -> None:
    """Change the 1x1x1 convolutions so that latents have WAN_MEAN and WAN_STD, and noise of ``noise`` times that."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    parts = []
    for _ in range(max(1, clip_count // clips.AT_ONCE)):
        scenes = clips.SceneBatch.of([random_scene(rng) for _ in range(clips.AT_ONCE)], generator, device)
        parts.append(encode_clips(model.encode, scenes))
    deviation, mean = torch.std_mean(torch.cat(parts).double(), dim=(0, 2, 3, 4))
    wan_mean = torch.tensor(WAN_MEAN, device=device, dtype=torch.float64)
    wan_std = torch.tensor(WAN_STD, device=device, dtype=torch.float64)
    scale = wan_std / deviation
    shift = wan_mean - mean * scale

    to_mean, _ = model.conv1.weight.chunk(2)
    log_variance = 2 * (noise * wan_std).log()  # the posterior's, a constant
    mean_bias, _ = model.conv1.bias.chunk(2)
    model.conv1.weight.copy_(torch.cat([to_mean * scale.view(-1, 1, 1, 1, 1), torch.zeros_like(to_mean)]))
    model.conv1.bias.copy_(torch.cat([mean_bias * scale + shift, log_variance]))
    from_latent = model.conv2.weight / scale.view(1, -1, 1, 1, 1)
    model.conv2.weight.copy_(from_latent)
    model.conv2.bias.copy_(model.conv2.bias - from_latent.flatten(1).double() @ shift)


@dataclass
class LatentSet:
    """Clips ready for training.

    latents: (clips, 16, 9, 32, 32) bfloat16, normalised.
    words, clauses: (clips, CAPTION_LENGTH) integers, -1 = padding.
    """

    latents: torch.Tensor
    words: torch.Tensor
    clauses: torch.Tensor

    @classmethod
    def make(
        cls,
        model: WanVAE,
        encoder: CaptionEncoder,
        seed: int,
        seconds: float,
        most: int = 60_000,
        *,
        compiled: bool = False,
    ) -> LatentSet:
        """Draw and encode fresh clips for ``seconds``, at most ``most`` of them; ``compiled``: by torch.compile."""
        encode: Encode = torch.compile(model.encode, dynamic=False) if compiled else model.encode
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        device = next(model.parameters()).device
        latents: list[torch.Tensor] = []
        words: list[list[int]] = []
        clauses: list[list[int]] = []
        start = time.monotonic()
        while time.monotonic() - start < seconds and len(words) < most:
            scenes = [random_scene(rng) for _ in range(clips.AT_ONCE)]
            encoded = normalised(encode_clips(encode, clips.SceneBatch.of(scenes, generator, device)))
            latents.append(encoded.bfloat16().contiguous())
            for scene in scenes:
                for numbers, rows in zip(encoder.tokens(scene.caption()), (words, clauses), strict=True):
                    rows.append(numbers + [-1] * (CAPTION_LENGTH - len(numbers)))
            if device.type == "cuda":
                torch.cuda.synchronize()
        count = len(words)
        print(f"latents: {count} clips in {time.monotonic() - start:.0f} s", flush=True)
        return cls(torch.cat(latents), torch.tensor(words, device=device), torch.tensor(clauses, device=device))

    @classmethod
    def load(cls, path: Path, device: torch.device) -> LatentSet:
        """Read what :meth:`save` wrote."""
        return cls(**load_file(path, device=str(device)))

    def save(self, path: Path) -> None:
        """Write the set as safetensors."""
        save_file({"latents": self.latents, "words": self.words, "clauses": self.clauses}, path)

    def __len__(self) -> int:
        return len(self.words)
