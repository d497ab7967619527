"""The image classifier, which is timm's: `make modalities-tests` runs this in an environment that has timm."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

if importlib.util.find_spec("timm") is None:
    pytest.skip("NOT TESTED HERE, timm is missing: run `make modalities-tests`", allow_module_level=True)

from lab.evaluation.variants import FULL_PRECISION, variants
from lab.training.modalities import images, language, melodies
from lab.training.modalities import train as command
from lab.training.modalities.pictures import Pictures
from lab.training.modalities.replaced_attention import ReplacedAttention

CPU = torch.device("cpu")


def sharpened(model: torch.nn.Module) -> torch.nn.Module:
    """An untrained model whose attention prefers some keys, as a trained one's does."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "qkv" in name:
                value.mul_(3)
    return model.eval()


def test_every_layer_takes_the_attention_given(fresh_seed: int) -> None:
    model, calls = images.classifier().eval(), []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(q.shape)
        return v

    pictures, _ = Pictures(fresh_seed, CPU).next(2)
    with torch.no_grad():
        plain = model(pictures)
        with ReplacedAttention(attend):
            other = model(pictures)
        assert torch.equal(model(pictures), plain)
    assert calls == [(2, 4, 256, 64)] * 4
    assert not torch.allclose(other, plain)


def test_every_attention_is_close_to_full_precision(fresh_seed: int) -> None:
    model = sharpened(images.classifier())
    pictures, _ = Pictures(fresh_seed, CPU).next(2)
    attentions = variants(None, smooth_v=True)
    outs = {}
    for name, attend in attentions.items():
        with torch.no_grad(), ReplacedAttention(attend):
            outs[name] = model(pictures)
    full = outs.pop(FULL_PRECISION)
    for name, out in outs.items():
        assert 0 < (out - full).norm() / full.norm() < 0.04, name


def test_loss_and_accuracy_of_an_answer_that_is_always_the_same(fresh_seed: int) -> None:
    model = images.classifier().eval()
    answer, margin = fresh_seed % 7, 2.0
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()[answer] = margin
    found = images.measure(model, 40, fresh_seed, F.scaled_dot_product_attention)
    pictures = Pictures(fresh_seed, CPU)
    right = torch.cat([pictures.next(count)[1] for count in (16, 16, 8)]) == answer
    share = right.float().mean().item()
    assert found["accuracy"] == pytest.approx(share)
    assert found["loss"] == pytest.approx(math.log(math.exp(margin) + 6) - margin * share, rel=1e-5)


def test_attention_that_timm_computes_itself_is_noticed() -> None:
    model = images.classifier().eval()
    model.blocks[2].attn.fused_attn = False
    with pytest.raises(RuntimeError, match=r"^3 attention calls in 1 batches of 4 layers.*TIMM_FUSED_ATTN"):
        images.measure(model, 1, 0, F.scaled_dot_product_attention)


def test_training_moves_every_weight_matrix(fresh_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(images._BATCH, "cpu", 2)
    trained = images.train(1.0, fresh_seed, CPU)
    assert not trained.training
    torch.manual_seed(fresh_seed)
    fresh = images.classifier()
    for (name, before), after in zip(fresh.named_parameters(), trained.parameters(), strict=True):
        assert before.ndim < 2 or not torch.equal(before, after), name


def test_the_command_measures_every_attention(fresh_seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "train", lambda *_: sharpened(language.LanguageModel()))
    monkeypatch.setattr(images, "train", lambda *_: sharpened(images.classifier()))
    monkeypatch.setattr(melodies, "train", lambda *_: sharpened(melodies.Transcriber()))
    # A kernel that runs anywhere.
    monkeypatch.setattr(command, "kernel_names", lambda: ["reference"])
    options = ["--device", "cpu", "--kernel", "reference", "--pieces", "1", "--pictures", "4", "--clips", "1"]
    assert command.main(["--output", str(tmp_path), *options]) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(results) == list(variants("reference", smooth_v=True))
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    for name, found in results.items():
        spoken, seen, heard = found["language"], found["images"], found["melodies"]
        texts = f"{spoken['perplexity']:.4f} | {spoken['accuracy']:.2%} | {seen['loss']:.4f} | {seen['accuracy']:.2%}"
        texts += f" | {heard['loss']:.4f} | {heard['errors']:.2%}"
        assert f"| {name} | {texts} |\n" in table
    # Every attention has its own numbers, in every model: none was measured in the place of another.
    full, reference = results.pop(FULL_PRECISION), results["SageAttn2-8b"]
    for name, found in results.items():
        assert found["language"]["perplexity"] != full["language"]["perplexity"], name
        assert found["images"]["loss"] != full["images"]["loss"], name
        assert found["melodies"]["loss"] != full["melodies"]["loss"], name
    assert results["SageAttn2-8b (reference kernel)"] == reference
    assert results["SageAttn2-8b, smooth V"] != reference
