"""An image classifier: a small vision transformer that says which shape a drawn picture shows.

The pictures are single frames of the demo model's clips with one thing in them, 64 x 64.
"""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import nn
from torch.nn import functional as F

from comfy_sage2.demo.sampler import half_precision
from comfy_sage2.demo.scenes import SHAPES, random_scene
from tools.train_demo_model import clips
from tools.train_demo_model.run import Run
from tools.train_demo_model.state import Schedule, TrainingState

from .transformer import AttentionFunction, Trunk

SIDE, PATCH = 64, 4
_DIM, _LAYERS, _HEAD_DIM = 256, 4, 64
_BATCH = {"cuda": 256, "cpu": 16}
_MATRIX_RATE, _OTHER_RATE = 5e-3, 1e-3


class ImageClassifier(nn.Module):
    """Pictures (batch, 3, SIDE, SIDE) to the logits of SHAPES."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _DIM, PATCH, stride=PATCH)
        self.trunk = Trunk((SIDE // PATCH) ** 2, _DIM, _LAYERS, _HEAD_DIM, F.scaled_dot_product_attention)
        self.logits = nn.Linear(_DIM, len(SHAPES))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.logits(self.trunk(self.patches(pictures).flatten(2).transpose(1, 2)).mean(dim=1))


class Pictures:
    """An endless series of pictures and the numbers of their shapes; a seed fixes it."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def next(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(count, 3, SIDE, SIDE) in [-1, 1] and (count,)."""
        scenes = []
        for _ in range(count):
            scene = random_scene(self._rng)
            # The middle of a clip, where everything that moves through the picture is in it.
            scenes.append(dataclasses.replace(scene, things=scene.things[:1]))
        batch = clips.SceneBatch.of(scenes, self._generator, self._device)
        pixels = ((torch.arange(SIDE, device=self._device) + 0.5) * (2 / SIDE) - 1).repeat(count, 1)
        times = torch.full((count, 1), 0.5, device=self._device)
        return clips.draw(batch, times, pixels, pixels).squeeze(2), batch.things[:, 0, 3]


def train(seconds: float, seed: int, device: torch.device) -> ImageClassifier:
    """Train for ``seconds`` on fresh pictures; returns the averaged model."""
    torch.manual_seed(seed)
    model = ImageClassifier().to(device)
    state = TrainingState(model, model.trunk.hidden_weights(), Schedule(seconds, _MATRIX_RATE, _OTHER_RATE))
    run, pictures = Run(), Pictures(seed, device)
    while run.goes_on(state):
        seen, shapes = pictures.next(_BATCH[device.type])
        with half_precision(device):
            logits = model(seen)
        loss = F.cross_entropy(logits.float(), shapes)
        state.step(loss)
        run.report("images", state, loss=loss)
    model.load_state_dict(state.average)
    return model.eval()


@torch.no_grad()
def measure(model: ImageClassifier, count: int, seed: int, attend: AttentionFunction) -> dict[str, float]:
    """Accuracy on ``count`` fresh pictures."""
    model.trunk.use_attention(attend)
    device = next(model.parameters()).device
    pictures, right, batch = Pictures(seed, device), 0.0, _BATCH[device.type]
    for first in range(0, count, batch):
        seen, shapes = pictures.next(min(batch, count - first))
        with half_precision(device):
            logits = model(seen)
        right += (logits.argmax(dim=1) == shapes).sum().item()
    return {"accuracy": right / count}
