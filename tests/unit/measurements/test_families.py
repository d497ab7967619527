"""The parts of `python -m lab families` that need no ComfyUI."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE
from lab.measurements.families.calls import Calls, counted
from lab.measurements.families.declared import FAMILIES
from lab.measurements.families.findings import FamilyRow, Findings, Served, TimedSteps
from lab.measurements.families.models import fill
from lab.measurements.families.page import document
from lab.measurements.families.paper import MODELS
from lab.measurements.overrides import attention_for_nothing


class Container:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def peek(self) -> torch.Tensor:
        return self.tensor


def test_calls_are_counted_by_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("comfy.ldm.stand_in")
    seen: list[Any] = []
    vars(module)["optimized_attention"] = lambda *args, **kwargs: seen.append((args, kwargs))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = vars(module)["optimized_attention"]
    short, long = torch.zeros(1, 3, 4), torch.zeros(1, 2, 9, 4)
    with counted() as calls:
        attention = vars(module)["optimized_attention"]
        attention(short, short, short, 1)
        attention(short, short, short, 1, torch.zeros(3, 3), transformer_options={OVERRIDE: print})
        attention(
            Container(long), Container(long), Container(long), 2, mask=None, transformer_options={OVERRIDE: print}
        )
    assert calls == Calls(made=3, unasked=1, masked=1, contained=1, longest=9)
    assert len(seen) == 3 and vars(module)["optimized_attention"] is before


@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_for_nothing_is_the_mean_of_the_values(heads_first: bool) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    # Without a scale every key has the same weight.
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.0, enable_gqa=True)
    tensors = [q, k, v] if heads_first else [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    flat = attention_for_nothing(None, tensors[0], tensors[1], tensors[2], 4, skip_reshape=heads_first)
    torch.testing.assert_close(flat, expected.transpose(1, 2).flatten(2))
    if heads_first:
        torch.testing.assert_close(
            attention_for_nothing(None, q, k, v, 4, skip_reshape=True, skip_output_reshape=True), expected
        )


def test_random_weights_keep_activations_alike() -> None:
    linear, norm = torch.nn.Linear(512, 512), torch.nn.RMSNorm(512)
    model = torch.nn.Sequential(linear, norm)
    for values in model.parameters():
        values.data.fill_(float("nan"))
    fill(model, torch.Generator().manual_seed(0))
    x = torch.randn(64, 512)
    assert 0.9 < float(linear(x).detach().std()) < 1.1
    assert abs(float(norm.weight.detach().mean()) - 1.0) < 0.05


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tiny_shapes_keep_the_structure(family: Any) -> None:
    """Whatever is smaller than in reality is a size or a number of blocks or heads; all else is the same."""
    smaller = {"layers", "heads", "size", "dim", "depth", "features", "channels", "txtheads", "kvheads"}
    real, tiny = family.real.config, family.tiny.config
    for name in real.keys() | tiny.keys():
        if real.get(name) != tiny.get(name):
            assert smaller & set(name.split("_")) or name in ("txtlayers", "txtdim", "txtkvheads"), name
            assert not name.endswith("head_dim")
    assert len(family.real.latents) == len(family.tiny.latents)
    for whole, part in zip(family.real.latents, family.tiny.latents, strict=True):
        assert whole[1] == part[1] and len(whole) == len(part)


def findings(timed: TimedSteps | None, is_gpu: bool) -> Findings:
    served = Served(Calls(made=10, unasked=2, masked=8), 6, {"[SA-101] too short": 2}, 0.999, 0.02)
    row = FamilyRow(FAMILIES[0], served, timed)
    return Findings("0.33.0", "a machine", "sm90 1.0.0", "python -m lab families", ["8b"], is_gpu, [row])


def test_the_page_says_what_was_not_run() -> None:
    text = document(findings(None, is_gpu=False))
    assert "**Not run on a GPU.**" in text and "| not run |" in text
    line = next(line for line in text.splitlines() if line.startswith("| MiniMax H3 |"))
    assert "| 4 | 3 | 4 | 1: [SA-101] too short; before the first step the text refiner" in line
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 2  # one number for each table


def test_the_page_compares_medians() -> None:
    seconds = {"ComfyUI's default": [3.0, 2.0, 9.0], "8b": [1.0, 1.5, 2.0], "attention for nothing": [0.5, 0.5, 0.5]}
    text = document(findings(TimedSteps(5000, seconds, "2 sm90 · 8b", 7.0), is_gpu=True))
    assert "Not run on a GPU" not in text
    assert "| 5000 | 3.000 (2.000 to 9.000) | 1.500 (1.000 to 2.000) | 0.500 (0.500 to 0.500) | 2.00 |" in text


def test_names_differ_and_large_models_say_how_many_layers_they_have() -> None:
    assert len({family.name for family in MODELS}) == len(MODELS) == 6
    assert {family.name.split(",")[0]: family.real.layers for family in MODELS if family.real.fewer} == {
        "CogVideoX1.5-5B": "5 of 42",
        "HunyuanVideo": "1 + 1 of 20 + 40",
        "Mochi": "8 of 48",
    }
    assert {family.real.layers for family in MODELS if not family.real.fewer} == {"all"}
