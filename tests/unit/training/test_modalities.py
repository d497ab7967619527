"""The language model, and what of the image classifier needs no timm; the rest is in tests/modalities."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lab.demo.scenes import MOTIONS, SHAPES, SIZES
from lab.evaluation.variants import FULL_PRECISION, variants
from lab.training import modalities as train_modalities
from lab.training.demo_model import clips
from lab.training.modalities import language
from lab.training.modalities import train as command
from lab.training.modalities.pictures import SIDE, Pictures
from lab.training.modalities.replaced_attention import ReplacedAttention

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(0, 128, (3 * language.CONTEXT,), generator=torch.Generator().manual_seed(0)).byte()


def test_no_symbol_sees_a_later_one(text: torch.Tensor) -> None:
    model = language.LanguageModel().eval()
    one = text[None, :64].long()
    other = one.clone()
    other[0, 40:] = 1
    with torch.no_grad():
        for attend in variants(None, is_causal=True, smooth_v=True).values():
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


def test_a_seed_fixes_the_pictures(fresh_seed: int) -> None:
    first, again, other = (Pictures(seed, CPU).next(8) for seed in (fresh_seed, fresh_seed, fresh_seed + 1))
    assert first[0].shape == (8, 3, SIDE, SIDE)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_the_answer_is_the_shape_of_the_one_largest_thing(fresh_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Any, ...]] = []
    draw = clips.draw

    def noted(*arguments: Any) -> torch.Tensor:
        drawn.append(arguments)
        return draw(*arguments)

    monkeypatch.setattr(clips, "draw", noted)
    _, answers = Pictures(fresh_seed, CPU).next(200)
    [(scenes, _, x, y)] = drawn
    sizes, colors, _, shapes, motions = scenes.things.unbind(2)
    large = sizes == SIZES.index("large")
    assert (large.sum(dim=1) == 1).all()
    assert torch.equal(shapes[large], answers)
    assert large.any(dim=0).all(), "in some place in depth there is never the largest thing"
    assert (answers.bincount(minlength=len(SHAPES)) > 0).all()
    assert (motions != MOTIONS.index("pulses")).all(), "a pulsing thing may look larger than the largest"
    every_color = torch.cat([colors, scenes.backdrops[:, 1:2]], dim=1)
    assert all(len(set(row)) == len(row) for row in every_color.tolist())
    # Whatever the camera's distance, the places that a thing can have are in the picture, and squares are square.
    half = (x[:, 1:2] - x[:, :1]) / 2
    for pixels in (x, y):
        assert torch.allclose(pixels.diff(dim=1), (2 * half).expand(-1, SIDE - 1), atol=1e-5)
        assert (pixels[:, :1] - half < -1 + 1e-5).all() and (pixels[:, -1:] + half > 1 - 1e-5).all()
    assert half.max() > 1.2 * half.min()


def test_a_thing_behind_is_hidden(fresh_seed: int) -> None:
    """Of five large squares in one place only the first is seen."""
    torch.manual_seed(fresh_seed)
    spins = MOTIONS.index("spins")
    things = torch.tensor([[[2, color, 0, SHAPES.index("square"), spins] for color in torch.randperm(8)[:5].tolist()]])
    chance = torch.rand(1, 1, 6).expand(1, 5, 6)
    backdrop, backdrop_chance = torch.tensor([[0, 7, 0]]), torch.rand(1, 4)
    pixels = ((torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1)[None]

    def picture(count: int) -> torch.Tensor:
        scenes = clips.SceneBatch(things[:, :count], backdrop, chance[:, :count], backdrop_chance)
        return clips.draw(scenes, torch.full((1, 1), 0.5), pixels, pixels)[0, :, 0]

    same = (picture(5) - picture(1)).abs().amax(dim=0) < 1e-6
    behind = clips.SceneBatch(things[:, :0], backdrop, chance[:, :0], backdrop_chance)
    empty = clips.draw(behind, torch.full((1, 1), 0.5), pixels, pixels)[0, :, 0]
    inside = (picture(1) - empty).abs().amax(dim=0) > 0.3
    # All but the antialiased outline, and the shadows around it.
    assert inside.sum() > 400
    assert (same & inside).sum() > 0.8 * inside.sum()


def test_attention_is_replaced_while_entered(fresh_seed: int) -> None:
    q, k, v = torch.randn(3, 2, 3, 8, 16).unbind()
    with ReplacedAttention(lambda q, k, v: q + 2 * k + 3 * v) as replaced:
        for _ in range(2):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False)
            assert torch.equal(out, q + 2 * k + 3 * v)
    assert replaced.calls == 2
    assert torch.allclose(F.scaled_dot_product_attention(q, k, v), (q @ k.mT / 4).softmax(dim=3) @ v, atol=1e-5)
    assert replaced.calls == 2


@pytest.mark.parametrize(
    ("name", "value"), [("is_causal", True), ("attn_mask", torch.ones(8, 8).bool()), ("dropout_p", 0.1), ("scale", 2.0)]
)
def test_attention_that_is_not_plain_is_refused(name: str, value: Any) -> None:
    q = torch.randn(1, 1, 8, 16)
    with ReplacedAttention(lambda q, k, v: v), pytest.raises(ValueError, match=f"only plain attention.*{name}"):
        F.scaled_dot_product_attention(q, q, q, **{name: value})


@pytest.fixture
def run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs the command where the module named is missing, which timm or we import; training would fail the test."""

    def run(missing: str) -> None:
        for name in [*sys.modules]:
            if name == "lab.training.modalities.images" or name.partition(".")[0] in ("timm", "torchvision"):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(train_modalities, "images", raising=False)
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
        (tmp_path / "timm").mkdir()
        (tmp_path / "timm" / "__init__.py").write_text(f"import {missing}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, missing, None)  # Python then says that there is no such module
        monkeypatch.setattr(language, "train", lambda *_: pytest.fail("trained"))
        command.main(["--output", str(tmp_path / "out"), "--device", "cpu"])

    return run


@pytest.mark.parametrize("missing", ["timm", "torchvision"])
def test_a_missing_timm_is_said_before_anything_is_trained(run_without: Callable[[str], None], missing: str) -> None:
    with pytest.raises(SystemExit, match=rf"^{missing} is missing.*\n *make modalities-environment\n"):
        run_without(missing)


def test_another_missing_module_is_not_called_timm(run_without: Callable[[str], None]) -> None:
    with pytest.raises(ModuleNotFoundError, match="something_else"):
        run_without("something_else")
