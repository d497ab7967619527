"""How much of a caption the classifier finds in drawn clips, in what the VAE makes of them, and in sampled ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import torch

from ...demo.captions import CaptionEncoder
from ...demo.sampler import half_precision
from ...demo.scenes import Scene, random_scene
from ...demo.wan_dit import WanDiT
from ...demo.wan_vae import WanVAE
from ...evaluation.caption_classifier import CaptionClassifier, shrunk, word_accuracy
from . import clips
from .sample import sample

_SEED = 4321  # of scenes that no stage of the training draws


@torch.no_grad()
def caption_accuracies(
    dit: WanDiT, vae: WanVAE, encoder: CaptionEncoder, classifier: CaptionClassifier, count: int
) -> dict[str, dict[str, float]]:
    """Share of the words of ``count`` held-out captions that are found, by kind: in "drawn", "VAE" and "sampled" clips.

    Drawn clips show what the classifier can find at best, the VAE's what the diffusion model can show at best.
    """
    rng = random.Random(_SEED)
    scenes = [random_scene(rng) for _ in range(count)]
    device = next(vae.parameters()).device
    videos = {
        "drawn": _drawn(scenes, device),
        "VAE": (_given_back(vae, video) for video in _drawn(scenes, device)),
        "sampled": _sampled(dit, vae, encoder, scenes),
    }
    return {what: word_accuracy(_read(classifier, each), scenes) for what, each in videos.items()}


def _read(classifier: CaptionClassifier, videos: Iterable[torch.Tensor]) -> torch.Tensor:
    device = next(classifier.parameters()).device
    return torch.cat([classifier(shrunk(video.to(device))) for video in videos])


def _drawn(scenes: list[Scene], device: torch.device) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    for scene in scenes:
        yield clips.whole_clips(clips.SceneBatch.of([scene], generator, device))


def _given_back(vae: WanVAE, video: torch.Tensor) -> torch.Tensor:
    with half_precision(video.device):
        return vae.decode(vae.encode(video)).float().clamp(-1, 1)


def _sampled(dit: WanDiT, vae: WanVAE, encoder: CaptionEncoder, scenes: list[Scene]) -> Iterator[torch.Tensor]:
    for first in range(0, len(scenes), clips.AT_ONCE):
        captions = [scene.caption() for scene in scenes[first : first + clips.AT_ONCE]]
        yield sample(dit, vae, encoder, captions, seed=_SEED + first)
