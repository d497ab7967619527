"""Captions of the demo model: what can be said, and what it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lab.demo.captions import CAPTION_LENGTH, TEXT_DIM, CaptionEncoder, CaptionError, vocabulary
from lab.demo.scenes import random_captions

ENCODER = CaptionEncoder.random(seed=0)


@pytest.mark.slow
def test_every_caption_of_the_grammar_can_be_encoded() -> None:
    for caption in random_captions(300, seed=1):
        embedding = ENCODER.encode(caption)
        words = len(caption.split())
        assert embedding.shape == (1, CAPTION_LENGTH, TEXT_DIM)
        assert (embedding[0, :words].norm(dim=1) > 1).all()
        assert not embedding[0, words:].any()


def test_captions_use_the_whole_vocabulary() -> None:
    said = {word for caption in random_captions(2000, seed=2) for word in caption.split()}
    assert said == set(vocabulary())


def test_captions_depend_on_the_seed_alone() -> None:
    assert random_captions(5, seed=3) == random_captions(5, seed=3)
    assert random_captions(5, seed=3) != random_captions(5, seed=4)


def test_the_empty_caption_is_all_zeros() -> None:
    assert not ENCODER.encode("").any()


def test_a_word_means_something_else_in_another_clause() -> None:
    first = ENCODER.encode("a red ball spins and a red star falls over a red plain floor")[0]
    ball_red, star_red, floor_red = first[1], first[6], first[11]
    assert not torch.equal(ball_red, star_red)
    assert not torch.equal(star_red, floor_red)
    words, clauses = ENCODER.tokens("a red ball spins and a red star falls over a red plain floor")
    assert words[1] == words[6] == words[11]
    assert (clauses[1], clauses[6], clauses[11]) == (0, 1, 2)


def test_case_and_punctuation_do_not_matter() -> None:
    said = ENCODER.encode("a red ball spins over a blue plain floor")
    assert torch.equal(ENCODER.encode("A red ball spins, over a blue plain floor."), said)


def test_unknown_words_are_named() -> None:
    with pytest.raises(CaptionError, match=r"'dragon'.*It knows these words only.*bounces"):
        ENCODER.encode("a red dragon bounces over a blue plain floor")


def test_too_long_captions_are_refused() -> None:
    with pytest.raises(CaptionError, match=f"{CAPTION_LENGTH + 1} words, expected at most {CAPTION_LENGTH}"):
        ENCODER.encode(" ".join(["red"] * (CAPTION_LENGTH + 1)))


def test_codes_survive_saving(tmp_path: Path) -> None:
    path = tmp_path / "codes.safetensors"
    ENCODER.save(path)
    caption = random_captions(1, seed=5)[0]
    assert torch.equal(CaptionEncoder.load(path).encode(caption), ENCODER.encode(caption))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(CaptionError, match="has no 'vocabulary'"):
        CaptionEncoder.load(path)
