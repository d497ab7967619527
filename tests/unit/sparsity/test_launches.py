"""How many kernels a choice of blocks launches, at real sizes: on meta tensors, for whose values nobody can wait."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comfy_sage2.backends import block_kernels
from comfy_sage2.sparsity import thresholds
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import Level
from comfy_sage2.sparsity.thresholds import choose

KERNELS_OF_MODULE = 5  # the means of K and Q and the scores before a choice, and the lists behind it
_KERNELS = {"sort": 4, "_softmax": 2, "_log_softmax": 2}  # of those operations that have several
_NONE = ("empty", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Counts the kernels of operations on meta tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        name = func._schema.name.removeprefix("aten::")
        if isinstance(first, torch.Tensor) and first.is_meta and not func.is_view and not name.startswith(_NONE):
            self.count += _KERNELS.get(name, 1)
        return result


def launches(tokens: int, heads: int, level: Level, monkeypatch: pytest.MonkeyPatch, kv_heads: int = 0) -> int:
    monkeypatch.setattr(block_kernels, "_reads_by_flash", lambda x: True)
    monkeypatch.setattr(thresholds, "_in_float32", nullcontext)  # autocast does not know the device
    q, k, v = (
        torch.empty(1, tokens, count, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for count in (heads, kv_heads or heads, kv_heads or heads)
    )
    scores = torch.empty(1, heads, -(-tokens // 128), -(-tokens // 128), device="meta")
    counted = Launches()  # type: ignore[no-untyped-call]
    with counted:
        choose(Inputs(q, k, v, 0.1, always=((0, 500),)), scores, level)
    return counted.count + KERNELS_OF_MODULE


@pytest.mark.parametrize(
    ("level", "most"),
    [(Level(bound=0.05), 61), (Level(bound=0.05, tail=True), 120), (Level(share=0.1, tail=True), 111)],
)
def test_launches_do_not_grow_with_tokens_and_heads(level: Level, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {size: launches(*size, level, monkeypatch) for size in ((8192, 8), (8192, 40), (32_768, 24), (75_600, 40))}
    assert max(counts.values()) <= most, counts
    assert counts[8192, 8] == counts[8192, 40] == counts[32_768, 24]
    assert launches(8192, 32, level, monkeypatch, kv_heads=8) <= most
