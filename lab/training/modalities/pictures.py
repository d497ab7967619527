"""The image classifier's task: which shape has the largest of several things?

A picture shows things of the demo model's clips, 64 x 64. They hide parts of each other, and how far the camera is
differs from picture to picture: which thing is large is often seen only by comparing it with the others, wherever they
are. Noise and low contrast hide outlines, so that they have to be gathered from many patches, and no classifier is
always right.
"""

from __future__ import annotations

import torch

from ...demo.scenes import COLORS, MOTIONS, PATTERNS, SHAPES, SIZES, SURFACES
from ..demo_model import clips

SIDE = 64
THINGS = 4
_FARTHEST = 1.4  # how much smaller than in the nearest picture everything may be
_LEAST_CONTRAST = 0.5
_NOISE = 0.1  # standard deviation, where black is -1 and white 1
_LARGE = SIZES.index("large")
# In a single frame motions differ in where a thing is and how it is turned; only a pulsing one changes its size.
_PLACES = [index for index, motion in enumerate(MOTIONS) if motion != "pulses"]


class Pictures:
    """An endless series of pictures and the numbers of the right shapes; a seed fixes it on a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def next(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(count, 3, SIDE, SIDE), in [-1, 1] before the noise, and (count,)."""
        scenes, right = self._scenes(count)
        times = torch.full((count, 1), 0.5, device=self._device)
        distance = 1 + (_FARTHEST - 1) * self._chance(count, 1)
        pixels = (torch.arange(SIDE, device=self._device) + 0.5) * (2 / SIDE) - 1
        # The camera is moved as far aside as leaves all places that a thing can have in the picture.
        x, y = (pixels * distance + (distance - 1) * (2 * self._chance(count, 1) - 1) for _ in range(2))
        clean = clips.draw(scenes, times, x, y).squeeze(2)
        contrast = _LEAST_CONTRAST + (1 - _LEAST_CONTRAST) * self._chance(count, 1, 1, 1)
        noise = torch.randn(clean.shape, generator=self._generator, device=self._device)
        return contrast * clean + _NOISE * noise, right

    def _scenes(self, count: int) -> tuple[clips.SceneBatch, torch.Tensor]:
        """Scenes with one large thing, at any depth, and its shape; all colors differ, as in the demo's scenes."""
        largest = self._number(THINGS, count, 1)
        sizes = self._number(_LARGE, count, THINGS).scatter(1, largest, _LARGE)
        colors = self._chance(count, len(COLORS)).argsort(dim=1)
        patterns, shapes = self._number(len(PATTERNS), count, THINGS), self._number(len(SHAPES), count, THINGS)
        motions = torch.tensor(_PLACES, device=self._device)[self._number(len(_PLACES), count, THINGS)]
        surfaces, drifting = self._number(len(SURFACES), count), self._number(2, count)
        scenes = clips.SceneBatch(
            things=torch.stack([sizes, colors[:, :THINGS], patterns, shapes, motions], dim=2),
            backdrops=torch.stack([surfaces, colors[:, THINGS], drifting], dim=1),
            thing_chance=self._chance(count, THINGS, 6),
            backdrop_chance=self._chance(count, 4),
        )
        return scenes, shapes.gather(1, largest).squeeze(1)

    def _number(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self._generator, device=self._device)

    def _chance(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self._device)
