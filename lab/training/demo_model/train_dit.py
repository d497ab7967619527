"""Trains the diffusion transformer by flow matching on encoded clips."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from ...demo.captions import CaptionEncoder
from ...demo.sampler import TIMESTEPS, half_precision
from ...demo.wan_dit import WanDiT
from .latents import LatentSet
from .run import TrainingRun
from .state import TrainingSchedule, TrainingState

SHIFT = 3.0  # of the noise levels towards noise, as ModelSamplingSD3 has it
_CAPTION_DROP = 0.12
_BATCH = 64
_SHORT_SHARE, _SHORT_FRAMES = 0.3, 3  # at first only the first frames of clips: looks before motion
_MATRIX_RATE, _OTHER_RATE = 5e-3, 2e-3


class CaptionTable:
    """Caption codes on the training device: word and clause indices to embeddings."""

    def __init__(self, encoder: CaptionEncoder, device: torch.device):
        self._words = encoder.word_codes.to(device, torch.float32)
        self._clauses = encoder.clause_codes.to(device, torch.float32)

    def embed(self, words: torch.Tensor, clauses: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """(batch, length) indices, -1 = padding, and keep (batch,) bool to (batch, length, text_dim)."""
        embedding = self._words[words.clamp(min=0)] + self._clauses[clauses.clamp(min=0)]
        return embedding * ((words >= 0) & keep[:, None])[..., None]


def train_dit(
    model: WanDiT,
    encoder: CaptionEncoder,
    data: LatentSet,
    seconds: float,
    seed: int,
    checkpoint: Path,
    run: TrainingRun,
    *,
    looks_first: bool,
    compiled: bool = False,
) -> WanDiT:
    """Train for ``seconds``, going on from ``checkpoint`` if that file exists. Returns the averaged model.

    ``looks_first``: see only the first frames of clips at first. ``compiled``: its blocks through torch.compile.
    """
    device = data.latents.device
    state = TrainingState(model, model.hidden_weights(), TrainingSchedule(seconds, _MATRIX_RATE, _OTHER_RATE))
    if checkpoint.exists():
        state.resume(checkpoint)
    torch.manual_seed(seed + state.step_count)
    table = CaptionTable(encoder, device)
    if compiled:
        for block in model.blocks:  # one by one, since they share what is compiled
            block.compile(dynamic=False)
    while run.goes_on(state):
        short = looks_first and state.progress < _SHORT_SHARE
        frames = _SHORT_FRAMES if short else data.latents.shape[2]
        count = _BATCH * data.latents.shape[2] // frames
        rows = torch.randint(len(data), (count,), device=device)
        keep = torch.rand(count, device=device) >= _CAPTION_DROP
        text = table.embed(data.words[rows], data.clauses[rows], keep)
        loss = _flow_matching_loss(model, data.latents[rows, :, :frames].float(), text)
        state.step(loss)
        run.report("dit", state, loss=loss)
        if run.checkpoint_due():
            state.save(checkpoint)
    state.save(checkpoint)
    model.load_state_dict(state.average)
    return model.eval()


def _flow_matching_loss(model: WanDiT, latent: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    count = len(latent)
    # One level from each of `count` equal parts of [0, 1): less variance than independent draws.
    level = (torch.randperm(count, device=latent.device) + torch.rand(count, device=latent.device)) / count
    sigma = SHIFT * level / (1 + (SHIFT - 1) * level)
    noise = torch.randn_like(latent)
    mixed = torch.lerp(latent, noise, sigma.view(-1, 1, 1, 1, 1))
    with half_precision(latent.device):
        velocity = model(mixed, sigma * TIMESTEPS, text)
    return F.mse_loss(velocity.float(), noise - latent)
