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


def test_attention_for_nothing_is_the_mean_of_the_values() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    # Without a scale every key has the same weight.
    expected = scaled_dot_product_attention(q, k, v, scale=0.0, enable_gqa=True)
    out = attention_for_nothing(None, q, k, v, 4, skip_reshape=True, skip_output_reshape=True)
    torch.testing.assert_close(out, expected)
