"""Captions of the demo model: what can be said, and what it becomes."""

from __future__ import annotations

import random

import pytest
import torch

from lab.demo.captions import CAPTION_LENGTH, CaptionEncoder, CaptionError
from lab.demo.job import CAPTIONS_FILE, FOLDER, Job
from lab.demo.scenes import random_scene

ENCODER = CaptionEncoder.load(FOLDER / CAPTIONS_FILE)


def test_every_caption_of_the_grammar_can_be_encoded_and_says_the_whole_vocabulary() -> None:
    rng = random.Random(2)
    captions = [random_scene(rng).caption() for _ in range(2000)]
    assert {word for caption in captions for word in caption.split()} == set(ENCODER.words)
    for caption in [*captions[:100], Job().caption]:
        embedding = ENCODER.encode(caption)
        words = len(caption.split())
        assert embedding.shape == (1, CAPTION_LENGTH, 4096)
        assert (embedding[0, :words].norm(dim=1) > 1).all() and not embedding[0, words:].any()


def test_a_word_means_something_else_in_another_clause() -> None:
    first = ENCODER.encode("a red ball spins and a red star falls over a red plain floor")[0]
    ball_red, star_red, floor_red = first[1], first[6], first[11]
    assert not torch.equal(ball_red, star_red) and not torch.equal(star_red, floor_red)


@pytest.mark.parametrize(
    ("caption", "message"),
    [
        ("a red dragon bounces over a blue plain floor", r"'dragon'.*It knows these words only.*bounces"),
        (" ".join(["red"] * (CAPTION_LENGTH + 1)), f"{CAPTION_LENGTH + 1} words, expected at most {CAPTION_LENGTH}"),
        ("blue dragons " * 1000, r"know ('dragons', ){4}'dragons'\. It knows"),
    ],
)
def test_what_cannot_be_said_is_told(caption: str, message: str) -> None:
    with pytest.raises(CaptionError, match=message):
        ENCODER.encode(caption)
