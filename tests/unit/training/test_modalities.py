"""The language model and the image classifier that stand for the paper's other modalities."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from comfy_sage2.evaluation.variants import FULL_PRECISION, variants
from tools.train_modalities import images, language


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(0, 128, (3 * language.CONTEXT,), generator=torch.Generator().manual_seed(0)).byte()


def test_no_symbol_sees_a_later_one(text: torch.Tensor) -> None:
    model = language.LanguageModel().eval()
    one = text[None, :64].long()
    other = one.clone()
    other[0, 40:] = 1
    with torch.no_grad():
        for attend in variants(None, is_causal=True).values():
            model.trunk.use_attention(attend)
            # Quantised calls share scales among neighbours, later ones too: their noise, and nothing more, may differ.
            assert (model(one)[0, :40] - model(other)[0, :40]).abs().max() < 0.1
        model.trunk.use_attention(F.scaled_dot_product_attention)
        assert (model(one)[0, :40] - model(other)[0, :40]).abs().max() > 0.1


def test_random_text_is_as_hard_as_it_gets(text: torch.Tensor) -> None:
    torch.manual_seed(0)
    found = language.measure(language.LanguageModel().eval(), text, 2, variants(None, is_causal=True)[FULL_PRECISION])
    assert math.log(128) - 0.1 < math.log(found["perplexity"]) < math.log(128) + 1
    assert found["accuracy"] < 0.05


def test_the_corpus_is_split() -> None:
    training, test = language.corpus()
    assert len(training) > 5 * len(test) > 100_000
    assert int(training.max()) < language.SYMBOLS


def test_pictures_repeat_and_show_their_shapes() -> None:
    first, again = (images.Pictures(3, torch.device("cpu")).next(8) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert first[0].shape == (8, 3, images.SIDE, images.SIDE)
    assert len(first[1].unique()) > 2


def test_accuracy_counts_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = images.ImageClassifier().eval()
    always = torch.zeros(7)
    always[2] = 1
    monkeypatch.setattr(images.ImageClassifier, "forward", lambda self, seen: always.expand(len(seen), -1))
    found = images.measure(model, 40, 5, F.scaled_dot_product_attention)
    pictures = images.Pictures(5, torch.device("cpu"))
    shapes = torch.cat([pictures.next(count)[1] for count in (16, 16, 8)])
    assert found["accuracy"] == pytest.approx((shapes == 2).float().mean().item())
