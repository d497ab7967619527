"""The demo without ComfyUI: the same checkpoint in diffusers, patched through the public API."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors import safe_open

from comfy_sage2.integrations.diffusers import Patch, patch
from comfy_sage2.integrations.torch_attention import CallTensors
from comfy_sage2.options import AttentionOptions

from ..baselines import BASELINES
from .captions import CaptionEncoder
from .job import BASELINE_NOTE, FULL_PRECISION, Clip, Job, Progress
from .model import DemoModel
from .sampler import TIMESTEPS, noise_levels, pixels, starting_noise
from .tiny_wan import HEAD_DIM


class DiffusersHost:
    """Samples with diffusers' Wan 2.1."""

    def __init__(self, model: DemoModel) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # As ComfyUI does: half precision on a GPU, float32 on the CPU.
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        # torch's own `to`: that of diffusers warns of casting some modules that its loader would leave in float32.
        self._transformer = torch.nn.Module.to(load_transformer(model.dit), self._device, dtype)
        self._vae = torch.nn.Module.to(load_vae(model.vae), self._device, dtype)
        self._encoder = CaptionEncoder.load(model.captions)

    @torch.no_grad()
    def sample(self, job: Job, variant: str, progress: Progress) -> Clip:
        """Sample and decode one video."""
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            patched = None
            if variant != FULL_PRECISION:
                patched = stack.enter_context(
                    _Baseline(self._transformer, variant)
                    if variant in BASELINES
                    else patch(self._transformer, mode=variant, when="always", backend=job.backend)
                )
            latent = self._denoise(job, progress)
        frames = self._decode(latent)
        note = "diffusers' own attention" if patched is None else patched.summary()
        return Clip(variant, frames, latent[0].float().cpu(), time.monotonic() - start, note)

    def _denoise(self, job: Job, progress: Progress) -> torch.Tensor:
        """Euler steps with classifier-free guidance: (1, 16, latent frames, height / 8, width / 8) float32."""
        latent = starting_noise(job.seed, width=job.width, height=job.height, frames=job.frames).to(self._device)
        said = self._encoder.encode(job.caption)
        text = torch.cat([said, torch.zeros_like(said)]).to(self._device, self._transformer.dtype)
        for step, (sigma, following) in enumerate(noise_levels(job.steps, job.shift)):
            progress(step / job.steps)
            timestep = torch.full((2,), sigma * TIMESTEPS, device=self._device)
            inputs = torch.cat([latent, latent]).to(self._transformer.dtype)
            with_text, without = self._transformer(inputs, timestep, text, return_dict=False)[0].float().chunk(2)
            latent = latent + (following - sigma) * (without + job.guidance * (with_text - without))
        return latent

    def _decode(self, latent: torch.Tensor) -> torch.Tensor:
        """(frames, height, width, 3) uint8 on the CPU."""
        mean, std = (
            torch.tensor(values, device=latent.device).view(1, -1, 1, 1, 1)
            for values in (self._vae.config.latents_mean, self._vae.config.latents_std)
        )
        video = self._vae.decode((latent * std + mean).to(self._vae.dtype), return_dict=False)[0]
        return pixels(video[0].float()).cpu()


class _Baseline(Patch):
    """A patch whose calls a baseline of the paper answers."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        super().__init__(model, AttentionOptions(), when="always", backend=None)
        self._name = name

    def answer(
        self, inputs: CallTensors, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool
    ) -> torch.Tensor:
        """See `Patch.answer`."""
        q, k, v, mask = inputs
        out, _ = BASELINES[self._name](q, k, v, scale=scale, is_causal=is_causal, attn_mask=mask)
        self.calls[self._name] += 1
        return out.to(q.dtype)

    def summary(self) -> str:
        """See `Patch.summary`."""
        return f"{BASELINE_NOTE}; {super().summary()}"


def load_transformer(path: Path) -> Any:
    """A WanTransformer3DModel from a text-to-video checkpoint in Wan 2.1's own format."""
    with safe_open(str(path), framework="pt") as file:
        names = set(file.keys())
        dim, text_dim = file.get_slice("text_embedding.0.weight").get_shape()
        ffn_dim = file.get_slice("blocks.0.ffn.0.weight").get_shape()[0]
    config = {
        "num_attention_heads": dim // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "text_dim": text_dim,
        "ffn_dim": ffn_dim,
        "num_layers": sum(name.startswith("blocks.") and name.endswith(".ffn.0.weight") for name in names),
    }
    return _from_single_file(WanTransformer3DModel, path, config)


def load_vae(path: Path) -> Any:
    """An AutoencoderKLWan from a VAE in Wan 2.1's own format."""
    with safe_open(str(path), framework="pt") as file:
        base_dim = file.get_slice("decoder.head.0.gamma").get_shape()[0]
    return _from_single_file(AutoencoderKLWan, path, {"base_dim": base_dim})


def _from_single_file(kind: Any, path: Path, config: dict[str, int]) -> Any:
    """A float32 model. diffusers renames the tensors; without a config of its own it would ask its hub for one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"_class_name": kind.__name__, **config}), encoding="utf-8")
        model = kind.from_single_file(str(path), config=folder, local_files_only=True, low_cpu_mem_usage=False)
    return model.eval().requires_grad_(False)
