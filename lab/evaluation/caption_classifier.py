"""A small network that looks at a clip of the demo model's world, and says which words of a caption it sees.

It takes 17 frames, evenly spread over the clip and shrunk to 64 x 64. The order of a scene's two things is not visible,
so it says for each word whether any thing has it; the backdrop has exactly one surface and one color.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from ..demo.scenes import COLORS, MOTIONS, PATTERNS, SHAPES, SIZES, SURFACES, Scene

SIDE, FRAMES = 64, 17

THING_WORDS = {"size": SIZES, "color": COLORS, "pattern": PATTERNS, "shape": SHAPES, "motion": MOTIONS}
_THING_LOGITS = sum(map(len, THING_WORDS.values()))
_SPLITS = (_THING_LOGITS, 1, len(SURFACES), len(COLORS))  # things, drifting, surface, surface color
_WIDTHS = (24, 40, 64, 96, 96)
_STRIDES = ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 1, 1))


class CaptionClassifier(nn.Module):
    """Five convolutions over space and time, pooled."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width, stride in zip(_WIDTHS, _STRIDES, strict=True):
            layers += [nn.Conv3d(inputs, width, 3, stride, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
            inputs = width
        self.features = nn.Sequential(*layers)
        self.words = nn.Linear(2 * inputs, sum(_SPLITS))

    @classmethod
    def load(cls, path: str | Path) -> CaptionClassifier:
        """The trained network in float32 on the CPU."""
        model = cls()
        model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
        return model.eval().requires_grad_(False)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        """Clips from :func:`shrunk` to logits (batch, 44) in the order of :func:`targets`."""
        features = self.features(clips)
        result: torch.Tensor = self.words(
            torch.cat([features.mean(dim=(2, 3, 4)), features.amax(dim=(2, 3, 4))], dim=1)
        )
        return result


def shrunk(videos: torch.Tensor) -> torch.Tensor:
    """Convert videos (batch, 3, frames, height, width) in [-1, 1] to the classifier's input."""
    chosen = videos[:, :, torch.linspace(0, videos.shape[2] - 1, FRAMES).round().long()]
    return F.adaptive_avg_pool3d(chosen, (FRAMES, SIDE, SIDE))


def targets(scenes: Sequence[Scene]) -> torch.Tensor:
    """(batch, 44) of 0 and 1: the words of any thing, then of the backdrop."""
    rows = []
    for scene in scenes:
        row = [float(any(getattr(thing, kind) == word for thing in scene.things)) for kind, words in THING_WORDS.items()
               for word in words]  # fmt: skip
        row.append(float(scene.drifting))
        row += [float(word == scene.surface) for word in SURFACES]
        row += [float(word == scene.surface_color) for word in COLORS]
        rows.append(row)
    return torch.tensor(rows)


def word_accuracy(logits: torch.Tensor, scenes: Sequence[Scene]) -> dict[str, float]:
    """The share of the captions' words that the classifier sees, by kind and, as "caption", over all kinds.

    Of each kind the classifier names as many words as the caption has: the most probable ones.
    """
    things, drifting, surface, color = logits.float().cpu().split(_SPLITS, dim=1)
    thing_words, drifts, *backdrop = targets(scenes).split(_SPLITS, dim=1)
    kinds = dict(zip(THING_WORDS, things.split([len(words) for words in THING_WORDS.values()], dim=1), strict=True))
    said = dict(zip(THING_WORDS, thing_words.split([len(words) for words in THING_WORDS.values()], dim=1), strict=True))
    kinds |= {"surface": surface, "surface color": color}
    said |= dict(zip(("surface", "surface color"), backdrop, strict=True))
    seen = {kind: _seen(values, said[kind]) for kind, values in kinds.items()}
    counts = {kind: said[kind].sum().item() for kind in kinds}
    seen["drifting"], counts["drifting"] = ((drifting > 0) == (drifts > 0)).sum().item(), float(len(scenes))
    result = {kind: seen[kind] / counts[kind] for kind in seen}
    return {"caption": sum(seen.values()) / sum(counts.values()), **result}


def _seen(logits: torch.Tensor, said: torch.Tensor) -> float:
    """How many of the words in `said` are among as many most probable ones."""
    rank = logits.argsort(dim=1, descending=True).argsort(dim=1)
    return ((rank < said.sum(dim=1, keepdim=True)) * said).sum().item()
