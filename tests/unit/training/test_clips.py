"""The procedural clips that the demo model is trained on."""

from __future__ import annotations

import random

import pytest
import torch

from lab.demo.scenes import MOTIONS, PATTERNS, SHAPES, SURFACES, Scene, Thing
from lab.training.demo_model import clips

pytestmark = pytest.mark.slow

FRAMES, SIDE = 5, 48


def draw(*scenes: Scene) -> torch.Tensor:
    """Small clips of the scenes, all with the same choice of what captions leave open."""
    batch = clips.SceneBatch.of(scenes, torch.Generator().manual_seed(0), "cpu")
    same = clips.SceneBatch(
        batch.things,
        batch.backdrops,
        batch.thing_chance[:1].expand_as(batch.thing_chance),
        batch.backdrop_chance[:1].expand_as(batch.backdrop_chance),
    )
    times = torch.linspace(0, 1, FRAMES).repeat(len(scenes), 1)
    pixels = ((torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1).repeat(len(scenes), 1)
    return clips.draw(same, times, pixels, pixels)


def scene(shape: str = "square", motion: str = "orbits", pattern: str = "plain", surface: str = "plain") -> Scene:
    return Scene((Thing("large", "red", pattern, shape, motion),), surface, "blue", drifting=False)


def test_pixels_are_finite_and_in_range() -> None:
    video = draw(scene(), Scene(scene().things + scene("ball").things, "wavy", "green", drifting=True))
    assert video.shape == (2, 3, FRAMES, SIDE, SIDE)
    assert video.isfinite().all()
    assert video.min() >= -1
    assert video.max() <= 1


@pytest.mark.parametrize(
    ("field", "words"), [("shape", SHAPES), ("motion", MOTIONS), ("pattern", PATTERNS), ("surface", SURFACES)]
)
def test_every_word_is_seen(field: str, words: tuple[str, ...]) -> None:
    videos = draw(*(scene(**{field: word}) for word in words))
    for first in range(len(words)):
        for second in range(first):
            difference = (videos[first] - videos[second]).abs().mean()
            assert difference > 0.004, f"{words[first]} looks like {words[second]}"


@pytest.mark.parametrize("motion", MOTIONS)
def test_every_motion_moves(motion: str) -> None:
    video = draw(scene(motion=motion))[0]
    assert (video[:, 1:] - video[:, :-1]).abs().mean(dim=(0, 2, 3)).max() > 0.01


def test_a_still_backdrop_stands_still_and_a_drifting_one_moves() -> None:
    still = Scene((), "checkered", "green", drifting=False)
    drifting = Scene((), "checkered", "green", drifting=True)
    still_video, drifting_video = draw(still, drifting)
    assert torch.equal(still_video[:, 0], still_video[:, -1])
    assert (drifting_video[:, 0] - drifting_video[:, 1]).abs().mean() > 0.05


def test_the_first_thing_is_in_front() -> None:
    red, blue = (Thing("large", color, "plain", "square", "falls") for color in ("red", "blue"))
    red_first, red_alone = draw(Scene((red, blue), "plain", "white", False), Scene((red,), "plain", "white", False))
    chance = clips.SceneBatch.of([Scene((red, blue), "plain", "white", False)], torch.Generator().manual_seed(0), "cpu")
    assert chance.things[0, 0, 1] == 0  # the first row is the first thing: red
    covered = red_alone[0] - red_alone[2] > 1  # clearly red pixels
    assert covered.any()
    torch.testing.assert_close(red_first[:, covered], red_alone[:, covered])


def test_windows_are_parts_of_their_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "CANVAS", 16)
    monkeypatch.setattr(clips, "FRAMES", 9)
    scenes = [scene(), scene("star", "slides")]
    batch = clips.SceneBatch.of(scenes, torch.Generator().manual_seed(0), "cpu")
    whole, cuts = clips.whole_clips(batch), clips.windows(batch, 5, 8, random.Random(0))
    assert cuts.shape == (2, 3, 5, 8, 8)
    for video, cut in zip(whole, cuts, strict=True):
        places = video.unfold(1, 5, 1).unfold(2, 8, 1).unfold(3, 8, 1).permute(1, 2, 3, 0, 4, 5, 6)
        assert (places - cut).abs().flatten(3).amax(dim=3).min() < 1e-4


def test_most_windows_hold_a_thing() -> None:
    # Small, still and of a color by itself: three of four windows hold its middle, the others rarely.
    scene = Scene((Thing("small", "red", "plain", "ball", "pulses"),), "plain", "green", drifting=False)
    batch = clips.SceneBatch.of([scene] * 64, torch.Generator().manual_seed(1), "cpu")
    video = clips.windows(batch, 5, 32, random.Random(1))
    red = (video[:, 0] > 0.2).flatten(1).any(dim=1)
    assert 0.6 < red.float().mean() < 0.95
