"""The world of the demo model: which scenes exist and how a caption describes them.

A scene is one or two moving things in front of a backdrop, and its caption is one sentence::

    a small red striped ball bounces and a large white star spins over a drifting blue checkered floor

A caption names size and pattern only if they differ from medium and plain, and "drifting" only for a moving backdrop.
The words of these tables are the whole vocabulary of the demo model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SIZES = ("small", "medium", "large")
COLORS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
PATTERNS = ("plain", "striped", "spotted")
SHAPES = ("ball", "ring", "square", "triangle", "star", "cross", "crescent")
MOTIONS = ("bounces", "slides", "spins", "orbits", "swings", "pulses", "rises", "falls", "rolls")
SURFACES = ("plain", "striped", "checkered", "dotted", "wavy")

_ROUND_SHAPES = ("ball", "ring")
_TURNING_MOTIONS = ("spins", "rolls")


def _with_article(words: list[str]) -> str:
    article = "an" if words[0] == "orange" else "a"
    return " ".join([article, *words])


@dataclass(frozen=True)
class Thing:
    """One moving thing, by the words that describe it."""

    size: str
    color: str
    pattern: str
    shape: str
    motion: str

    def phrase(self) -> str:
        """For example ``a small red striped ball bounces``."""
        words = [word for word in (self.size,) if word != "medium"]
        words += [self.color]
        words += [word for word in (self.pattern,) if word != "plain"]
        return _with_article([*words, self.shape, self.motion])


@dataclass(frozen=True)
class Scene:
    """One or two things (the first is in front) over a backdrop."""

    things: tuple[Thing, ...]
    surface: str
    surface_color: str
    drifting: bool

    def caption(self) -> str:
        """The sentence that describes the scene."""
        backdrop = [*(["drifting"] if self.drifting else []), self.surface_color, self.surface, "floor"]
        return " and ".join(thing.phrase() for thing in self.things) + " over " + _with_article(backdrop)


def _random_thing(rng: random.Random, color: str) -> Thing:
    shape, motion = rng.choice(SHAPES), rng.choice(MOTIONS)
    # Without a pattern, nobody could see a round thing turn.
    needs_pattern = shape in _ROUND_SHAPES and motion in _TURNING_MOTIONS
    patterns = PATTERNS[1:] if needs_pattern else PATTERNS
    return Thing(size=rng.choice(SIZES), color=color, pattern=rng.choice(patterns), shape=shape, motion=motion)


def random_scene(rng: random.Random) -> Scene:
    """Draw a scene; its things and its backdrop have different colors."""
    first, second, backdrop = rng.sample(COLORS, 3)
    colors = (first, second) if rng.random() < 0.5 else (first,)
    return Scene(
        things=tuple(_random_thing(rng, color) for color in colors),
        surface=rng.choice(SURFACES),
        surface_color=backdrop,
        drifting=rng.random() < 0.5,
    )
