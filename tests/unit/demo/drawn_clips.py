"""Draws the training clips: scenes of :mod:`lab.demo.scenes` as batches of antialiased video, in plain PyTorch.

Coordinates: the canvas is [-1, 1] in x (right) and y (down), whatever the window that is drawn. Time runs from 0 at the
first frame of a clip to 1 at its last. Pixel values are in [-1, 1], as a VAE takes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.demo.scenes import COLORS, MOTIONS, PATTERNS, SHAPES, SIZES, SURFACES, Scene, Thing

CANVAS = 256
FRAMES = 33

_RADIUS = (0.28, 0.38, 0.50)  # by size
_RGB = (
    (0.90, 0.10, 0.12),
    (1.00, 0.55, 0.05),
    (0.98, 0.90, 0.15),
    (0.15, 0.75, 0.25),
    (0.10, 0.85, 0.90),
    (0.15, 0.30, 0.95),
    (0.60, 0.20, 0.85),
    (0.95, 0.95, 0.95),
)
_LIGHT = (-0.5, -0.7)  # the light comes from the upper left
_ABSENT = -1
_ON_THINGS = 0.75  # share of the windows


@dataclass(frozen=True)
class SceneBatch:
    """Scenes as integers, and the numbers that a caption leaves open.

    things: (batch, things, 5) integers, the first thing in front: size, color, pattern, shape, motion; -1 for no thing.
    backdrops: (batch, 3) integers: surface, color, drifting.
    thing_chance: (batch, things, 6), backdrop_chance: (batch, 4), uniform in [0, 1): first places, phases, directions.
    """

    things: Tensor
    backdrops: Tensor
    thing_chance: Tensor
    backdrop_chance: Tensor

    @classmethod
    def of(cls, scenes: Sequence[Scene], generator: torch.Generator, device: torch.device | str) -> SceneBatch:
        """Turn scenes into tensors on ``device``; ``generator`` (CPU) draws what the captions leave open."""
        nothing = [[_ABSENT] * 5]
        things = [([*map(_indices, scene.things)] + nothing)[:2] for scene in scenes]
        backdrops = [
            (SURFACES.index(scene.surface), COLORS.index(scene.surface_color), int(scene.drifting)) for scene in scenes
        ]
        return cls(
            torch.tensor(things, device=device),
            torch.tensor(backdrops, device=device),
            torch.rand(len(scenes), 2, 6, generator=generator).to(device),
            torch.rand(len(scenes), 4, generator=generator).to(device),
        )


def _indices(thing: Thing) -> list[int]:
    return [
        SIZES.index(thing.size),
        COLORS.index(thing.color),
        PATTERNS.index(thing.pattern),
        SHAPES.index(thing.shape),
        MOTIONS.index(thing.motion),
    ]


def draw(batch: SceneBatch, times: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Draw clips.

    times: (batch, frames), each in [0, 1]; x: (batch, width) and y: (batch, height), canvas coordinates of the pixels.
    Returns (batch, 3, frames, height, width) float32 in [-1, 1].
    """
    pixel = (x[:, 1] - x[:, 0])[:, None, None, None]
    grid_x, grid_y = x[:, None, None, :], y[:, None, :, None]
    image = _backdrop(batch, times, grid_x, grid_y, pixel)
    for column in reversed(range(batch.things.shape[1])):  # the first thing is in front
        image = _over(image, batch.things[:, column], batch.thing_chance[:, column], times, grid_x, grid_y, pixel)
    return image.clamp(0, 1) * 2 - 1


def _coverage(distance: Tensor, pixel: Tensor) -> Tensor:
    """How much of a pixel lies inside (distance < 0): the antialiasing."""
    return (0.5 - distance / pixel).clamp(0, 1)


def _wave(position: Tensor, period: float, pixel: Tensor) -> Tensor:
    """Stripes along a coordinate: 1 and 0 by turns, each half a period wide, with antialiased edges."""
    phase = position / period
    return _coverage(((phase - phase.floor() - 0.5).abs() - 0.25) * period, pixel)


def _dots(x: Tensor, y: Tensor, period: float, pixel: Tensor) -> Tensor:
    """Round dots on a square lattice."""
    in_x = x - (x / period).round() * period
    in_y = y - (y / period).round() * period
    return _coverage((in_x * in_x + in_y * in_y + 1e-8).sqrt() - 0.28 * period, pixel)


def _colors(index: Tensor, device: torch.device) -> list[Tensor]:
    """Three (batch, 1, 1, 1) channels of the colors of ``index`` (batch,)."""
    table = torch.tensor(_RGB, device=device)[index.clamp(min=0)]
    return [table[:, channel, None, None, None] for channel in range(3)]


def _backdrop(batch: SceneBatch, times: Tensor, x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    surface, _, drifting = (column[:, None, None, None] for column in batch.backdrops.unbind(1))
    chance = batch.backdrop_chance[:, :, None, None, None]
    heading = (chance[:, 0] * 8).floor() * (math.pi / 4)
    shift = drifting * times[:, :, None, None] * 0.9
    u = x - shift * heading.cos() + chance[:, 1]
    v = y - shift * heading.sin() + chance[:, 2]
    turned = chance[:, 3] < 0.5
    along = torch.where(turned, u, v)
    across = torch.where(turned, v, u)
    stripes = _wave((u + v) * math.sqrt(0.5), 0.36, pixel)
    checks_u, checks_v = _wave(u, 0.5, pixel), _wave(v, 0.5, pixel)
    checks = checks_u + checks_v - 2 * checks_u * checks_v
    waves = _wave(along + 0.07 * (across * 9).sin(), 0.4, pixel)
    pattern = torch.zeros_like(u * v)
    for name, drawn in (
        ("striped", stripes),
        ("checkered", checks),
        ("dotted", _dots(u, v, 0.4, pixel)),
        ("wavy", waves),
    ):
        pattern = torch.where(surface == SURFACES.index(name), drawn, pattern)
    # A plain drifting floor is shaded in a way that drifts too; everything else has a fixed, slight shade.
    shade = 0.92 + 0.10 * torch.where(surface == 0, (3 * u + 2 * v).sin(), -y)
    level = (0.30 + 0.28 * pattern) * shade
    return torch.stack([channel * level + 0.04 for channel in _colors(batch.backdrops[:, 1], x.device)], dim=1)


def _triangle_wave(phase: Tensor) -> Tensor:
    """A wave between -1 and 1 of period 1, in straight lines."""
    return 4 * (phase - phase.floor() - 0.5).abs() - 1


def _placement(motion: Tensor, radius: Tensor, chance: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where a thing is: center x and y, turn (radians) and radius, each broadcastable to (batch, frames, 1, 1)."""
    side = torch.where(chance[:, 0] < 0.5, -1.0, 1.0)
    phase, room = chance[:, 1], 0.92 - radius
    at_x, at_y = (2 * chance[:, 2] - 1) * room, (2 * chance[:, 3] - 1) * room
    rest, tilt = torch.zeros_like(t), (2 * chance[:, 4] - 1) * 0.2
    wander = _triangle_wave(phase + side * 0.4 * t) * room
    hop = 1.7 * t + chance[:, 5]
    hop = hop - hop.floor()
    circle = 2 * math.pi * (phase + side * t)
    swing = side * 0.8 * (2 * math.pi * (t + phase)).sin()
    way = 1.5 * t - 0.75
    places = {
        "bounces": (wander, room - (room + 0.45) * 4 * hop * (1 - hop), tilt, radius),
        "slides": (_triangle_wave(phase + side * 0.9 * t) * room, at_y, tilt, radius),
        "spins": (at_x * 0.7, at_y * 0.7, side * 2 * math.pi * (0.8 * t + phase), radius),
        "orbits": (0.5 * circle.cos(), 0.5 * circle.sin(), tilt, radius),
        "swings": (1.3 * swing.sin(), 1.3 * swing.cos() - 1.1, -swing, radius),
        "pulses": (at_x * 0.7, at_y * 0.7, tilt, radius * (1 + 0.4 * (2 * math.pi * (1.5 * t + phase)).sin())),
        "rises": (at_x, -way, tilt, radius),
        "falls": (at_x, 1.6 * t * t - 0.8, tilt, radius),
        "rolls": (side * way, room, side * way / radius, radius),
    }
    result = [rest, rest, rest, radius]
    for index, name in enumerate(MOTIONS):
        result = [torch.where(motion == index, new, old) for new, old in zip(places[name], result, strict=True)]
    return result[0], result[1], result[2], result[3]


def _star_distance(x: Tensor, y: Tensor, radius: Tensor, points: int, inner: float) -> Tensor:
    """Signed distance to the edges of a star of ``points`` tips; ``inner`` is its notches' radius over ``radius``.

    With inner = cos(pi / points) the star is the regular polygon.
    """
    angle = torch.atan2(x, -y) / (2 * math.pi / points)
    folded = (angle - angle.round()).abs() * (2 * math.pi / points)
    length = (x * x + y * y + 1e-8).sqrt()
    along, aside = length * folded.cos(), length * folded.sin()
    notch_x, notch_y = inner * math.cos(math.pi / points), inner * math.sin(math.pi / points)
    normal = math.hypot(notch_y, 1 - notch_x)
    return ((along - radius) * notch_y + aside * (1 - notch_x)) / normal


def _distance(shape: Tensor, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Signed distance to the outline of each shape, negative inside."""
    from_center = (x * x + y * y + 1e-8).sqrt()
    corner = torch.maximum(x.abs(), y.abs())
    arm = torch.minimum(x.abs(), y.abs())
    bite_x = x - 0.45 * radius
    bite = (bite_x * bite_x + y * y + 1e-8).sqrt()
    outlines = {
        "ball": from_center - radius,
        "ring": (from_center - 0.75 * radius).abs() - 0.25 * radius,
        "square": corner - 0.85 * radius,
        "triangle": _star_distance(x, y + 0.2 * radius, 1.2 * radius, 3, 0.5),
        "star": _star_distance(x, y, 1.15 * radius, 5, 0.45),
        "cross": torch.maximum(corner - radius, arm - 0.34 * radius),
        "crescent": torch.maximum(from_center - radius, 0.8 * radius - bite),
    }
    result = outlines["ball"]
    for index, name in enumerate(SHAPES):
        result = torch.where(shape == index, outlines[name], result)
    return result


def _over(image: Tensor, things: Tensor, chance: Tensor, times: Tensor, x: Tensor, y: Tensor, pixel: Tensor) -> Tensor:
    """Draw one thing of each clip, with its shadow, over ``image``."""
    size, _, pattern, shape, motion = (column[:, None, None, None] for column in things.unbind(1))
    there = (size != _ABSENT).float()
    radius = torch.tensor(_RADIUS, device=x.device)[size.clamp(min=0)]
    placement = _placement(motion, radius, chance[:, :, None, None, None], times[:, :, None, None])
    center_x, center_y, turn, radius = placement
    off_x, off_y = x - center_x, y - center_y
    cos, sin = turn.cos(), turn.sin()
    local_x, local_y = off_x * cos + off_y * sin, off_y * cos - off_x * sin
    distance = _distance(shape, local_x, local_y, radius)

    from_shadow = ((off_x - 0.07) ** 2 + (off_y - 0.09) ** 2).sqrt() / radius
    shadow = 1 - 0.45 * there * (1.6 - 1.4 * from_shadow).clamp(0, 1)
    stripes = _wave(local_x, 0.24, pixel)
    spots = _dots(local_x, local_y, 0.24, pixel)
    mark = torch.where(pattern == 1, stripes, torch.where(pattern == 2, spots, torch.zeros_like(spots)))
    mark = mark * 0.75
    light = 0.92 + 0.22 * (off_x * _LIGHT[0] + off_y * _LIGHT[1]) / radius
    inside = _coverage(distance + 0.028, pixel)
    level = light * (0.25 + 0.75 * inside)
    cover = _coverage(distance, pixel) * there

    channels = []
    for channel, background in zip(_colors(things[:, 1], x.device), image.unbind(1), strict=True):
        # Marks are pale on a dark color and dark on a pale one, so that they are seen on every color.
        paint = (channel * (1 - mark) + mark * (1 - channel) * 0.5) * level
        channels.append(background * shadow * (1 - cover) + paint * cover)
    return torch.stack(channels, dim=1)
