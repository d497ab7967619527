"""Trains the network that reads captions off clips, on clips drawn at its own small size."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from ...demo.sampler import half_precision
from ...demo.scenes import Scene, random_scene
from ...evaluation.caption_classifier import FRAMES, SIDE, CaptionClassifier, loss, targets, word_accuracy
from . import clips
from .run import TrainingRun
from .state import TrainingSchedule, TrainingState

_BATCH, _TEST_CLIPS = 128, 1024
_MATRIX_RATE, _OTHER_RATE = 5e-3, 2e-3
_MOST_NOISE = 0.15  # sampled clips are less clean than drawn ones


def train_classifier(
    seconds: float, seed: int, device: torch.device, checkpoint: Path, run: TrainingRun, *, compiled: bool = False
) -> CaptionClassifier:
    """Train for ``seconds``, going on from ``checkpoint`` if that file exists. ``compiled``: through torch.compile.

    Returns the averaged model and prints its accuracy on fresh clips.
    """
    torch.manual_seed(seed)
    model = CaptionClassifier().to(device)
    convolutions: list[torch.Tensor] = [value for value in model.parameters() if value.ndim == 5]
    state = TrainingState(model, convolutions[1:], TrainingSchedule(seconds, _MATRIX_RATE, _OTHER_RATE))
    if checkpoint.exists():
        state.resume(checkpoint)
    rng = random.Random(seed + state.step_count)
    generator = torch.Generator().manual_seed(seed + state.step_count)
    if compiled:
        model.compile(dynamic=False)
    while run.goes_on(state):
        scenes, video = _batch(_BATCH, rng, generator, device)
        noise = _MOST_NOISE * torch.rand(_BATCH, 1, 1, 1, 1, device=device)
        with half_precision(device):
            logits = model(video + noise * torch.randn_like(video))
        error = loss(logits.float(), scenes)
        state.step(error)
        run.report("classifier", state, loss=error)
    state.save(checkpoint)
    model.load_state_dict(state.average)
    model.eval()
    fresh = [random_scene(rng) for _ in range(_TEST_CLIPS)]
    with torch.no_grad():  # for which the model would be compiled once more, so this goes past it
        parts = [model.forward(_draw(fresh[i : i + _BATCH], generator, device)) for i in range(0, _TEST_CLIPS, _BATCH)]
    found = word_accuracy(torch.cat(parts), fresh)
    print("classifier: " + ", ".join(f"{kind} {share:.3f}" for kind, share in found.items()), flush=True)
    return model


def _batch(
    count: int, rng: random.Random, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    scenes = [random_scene(rng) for _ in range(count)]
    return targets(scenes).to(device), _draw(scenes, generator, device)


def _draw(scenes: list[Scene], generator: torch.Generator, device: torch.device) -> torch.Tensor:
    batch = clips.SceneBatch.of(scenes, generator, device)
    times = torch.linspace(0, 1, FRAMES, device=device).repeat(len(scenes), 1)
    pixels = ((torch.arange(SIDE, device=device) + 0.5) * (2 / SIDE) - 1).repeat(len(scenes), 1)
    return clips.draw(batch, times, pixels, pixels)
