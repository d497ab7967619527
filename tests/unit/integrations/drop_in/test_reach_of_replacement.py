"""Who comes to `sageattn` in the place of torch's scaled_dot_product_attention, and who goes on to torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comfy_sage2.integrations.sageattention import functions, serving

torchs: Any = F.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("reference")
x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
LAYERS: dict[str, Callable[[], Callable[[], Any]]] = {
    "MultiheadAttention": lambda: _call(nn.MultiheadAttention(32, 4, batch_first=True), x, x, x, need_weights=False),
    "MultiheadAttention with weights": lambda: _call(nn.MultiheadAttention(32, 4, batch_first=True), x, x, x),
    "TransformerEncoderLayer": lambda: _call(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), x),
    "TransformerDecoderLayer": lambda: _call(nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True), x, x),
}


def _call(layer: nn.Module, *args: Any, **options: Any) -> Callable[[], Any]:
    layer.eval()
    return lambda: layer(*args, **options)


@pytest.mark.parametrize(
    ("layer", "with_gradients", "without"),
    [
        ("MultiheadAttention", 1, 0),
        ("MultiheadAttention with weights", 0, 0),
        ("TransformerEncoderLayer", 1, 0),
        ("TransformerDecoderLayer", 2, 1),
    ],
)
def test_layers_of_torch_in_evaluation(
    layer: str, with_gradients: int, without: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients self-attention is a function of torch's own in C++, which calls no other."""
    seen = []

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(args)
        return functions.sageattn(*args, **options)

    call = LAYERS[layer]()
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    call()
    assert len(seen) == with_gradients
    seen.clear()
    with torch.no_grad():
        call()
    assert len(seen) == without


@pytest.mark.parametrize(
    "name",
    [torchs, torch._C._nn.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention],
    ids=["imported before", "torch._C._nn", "torch.ops.aten"],
)
def test_other_names_of_the_function_stay_torchs(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", functions.sageattn)
    q = x[:, None]
    assert torch.equal(name(q, q, q), torchs(q, q, q))
    assert serving.calls.lines() == []
    assert not torch.equal(F.scaled_dot_product_attention(q, q, q), torchs(q, q, q))
    assert serving.calls.lines() == ["Calls of sageattention since the start: 1 by reference, 8b"]
