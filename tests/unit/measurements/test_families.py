"""The parts of `python -m lab families` that need no ComfyUI."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE
from lab.families.attentions import attention_for_nothing, override_of
from lab.families.calls import Calls, counted
from lab.families.declared import FAMILIES
from lab.families.models import fill
from lab.families.page import DEFAULT, NOTHING, FamilyRow, Served, TimedSteps, body
from lab.families.run import settings_of

HEADS = 4


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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    assert q.shape[1] == HEADS
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def never(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("ComfyUI's attention was asked")


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_every_layout_gives_the_same(skip_reshape: bool, skip_output_reshape: bool, fresh_seed: int) -> None:
    torch.manual_seed(fresh_seed)
    q, k, v = torch.randn(3, 2, HEADS, 10, 16).unbind()
    mask = torch.rand(10, 10) < 0.7
    mask[:, 0] = True
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    given = (q, k, v) if skip_reshape else tuple(tensor.transpose(1, 2).flatten(2) for tensor in (q, k, v))
    forms = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    out = override_of(attend, takes_mask=True)(never, *given, HEADS, mask, **forms, attn_precision=None)
    torch.testing.assert_close(out, expected if skip_output_reshape else expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("more", [{"mask": torch.ones(10, 10)}, {"scale": 0.5}])
def test_what_an_attention_does_not_take_stays_with_comfyui(more: dict[str, Any], fresh_seed: int) -> None:
    q, k, v = torch.randn(3, 2, 10, HEADS * 16).unbind()
    asked: list[Any] = []

    def comfyui(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append((args, kwargs))
        return q

    out = override_of(never, takes_mask=False)(comfyui, q, k, v, HEADS, **more)
    [((*tensors, heads, mask), kwargs)] = asked
    assert out is q and all(a is b for a, b in zip(tensors, (q, k, v), strict=True)) and heads == HEADS
    assert mask is more.get("mask") and kwargs.get("scale") == more.get("scale")
    assert kwargs["skip_reshape"] is kwargs["skip_output_reshape"] is False


def test_attention_for_nothing_is_the_mean_of_the_values() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    # Without a scale every key has the same weight.
    expected = scaled_dot_product_attention(q, k, v, scale=0.0, enable_gqa=True)
    out = attention_for_nothing(None, q, k, v, 4, skip_reshape=True, skip_output_reshape=True)
    torch.testing.assert_close(out, expected)


def test_random_weights_keep_activations_alike() -> None:
    linear, norm = torch.nn.Linear(512, 512), torch.nn.RMSNorm(512)
    model = torch.nn.Sequential(linear, norm)
    for values in model.parameters():
        values.data.fill_(float("nan"))
    fill(model, torch.Generator().manual_seed(0))
    assert 0.9 < float(linear(torch.randn(64, 512)).detach().std()) < 1.1
    assert abs(float(norm.weight.detach().mean()) - 1.0) < 0.05


def test_a_mode_may_be_sparse() -> None:
    sparse, plain = settings_of("8b sparse light", "auto"), settings_of("precise", "reference")
    assert (sparse.mode, sparse.sparse, sparse.dense_percent) == ("8b", "light", 0.0)
    assert (plain.mode, plain.sparse, plain.backend) == ("precise", "off", "reference")


def row(timed: TimedSteps | None) -> FamilyRow:
    served = Served(Calls(made=10, unasked=2, masked=8), 6, {"[SA-101] too short": 2}, 0.999, 0.02)
    return FamilyRow(FAMILIES[0], served, timed)


def test_the_page_compares_medians() -> None:
    seconds = {DEFAULT: [3.0, 2.0, 9.0], "8b": [1.0, 1.5, 2.0], "cuDNN": [2.0], NOTHING: [0.5, 0.5, 0.5]}
    text = "\n".join(body([row(TimedSteps(5000, seconds, "2 sm90 · 8b", 7.0)), row(None)], ["8b"], is_gpu=True))
    assert "| ComfyUI's default | 8b | cuDNN | attention for nothing | 8b: times as fast | calls in 8b |" in text
    assert "| 5000 | 3.000 (2.000 to 9.000) | 1.500 (1.000 to 2.000) | 2.000 (2.000 to 2.000) | 0.500" in text
    assert "| 2.00 | 2 sm90 · 8b | 7.0 |" in text and "Not run on a GPU" not in text
